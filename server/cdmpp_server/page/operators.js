// Parser of the text field: one operator per line, as on the command line, with an optional count
// ("4 × linear:m=512,...") and sizes that may use variables ("tokens = 1024").

import { evaluate, namesIn, renamed } from "./expressions.js";

const COUNTED = /^(\d+)\s*[x×*]\s*(.+)$/;
const VARIABLE = /^([A-Za-z_]\w*)\s*=\s*(\d+)$/;
/** Numeric fields that are not sizes: the number of added tensors. */
const NO_SIZES = ["inputs"];
const BATCH_LIKE = ["batch", "tokens", "m", "rows"];

/** Sizes of the examples by field; OWN overrides them for some operators. */
const USUAL = {
  m: 512, n: 4096, k: 1024, batch: 8, rows: 4096, cols: 1024, table_rows: 50000,
  q_len: 512, past_len: 2048, heads: 32, kv_heads: 8, head_dim: 128,
  c: 64, c_in: 64, c_out: 64, h: 56, w: 56, kh: 3, kw: 3, pad_h: 1, pad_w: 1,
};
const OWN = {
  bmm: { batch: 96, m: 128, n: 128, k: 64 },
  conv2d: { n: 8 }, batch_norm: { n: 8 }, max_pool2d: { n: 8 }, avg_pool2d: { n: 8 },
  attention_decode: { q_len: 1 }, attention_encoder: { past_len: 0, kv_heads: 32 },
  attention_prefill: { past_len: 0 }, attention_backward: { v_dim: 128 },
  softmax_cross_entropy: { cols: 128256 }, fused_add_rms_norm: { cols: 4096 },
  attention_mixed: { q_len: 512, past_len: 1024, decodes: 32, decode_past_len: 2048 },
  mla_prefill: { batch: 1, q_len: 2048, past_len: 0, heads: 16 },
  mla_decode: { batch: 32, q_len: 1, past_len: 4096, heads: 16 },
  moe: { tokens: 1024, hidden: 4096, intermediate: 1536, experts: 128, topk: 8 },
  moe_w13: { tokens: 1024, hidden: 4096, intermediate: 1536, experts: 128, topk: 8 },
  grouped_gemm: { groups: 8, rows: 4096, n: 4096, k: 2048 },
  rotary_embedding: { cols: 5120 }, kv_cache_save: { cols: 2048 }, argmax: { rows: 64, cols: 128256 },
  moe_gating: { cols: 128, topk: 8 }, moe_shuffle: { cols: 4096, topk: 8 },
  all_reduce: { bytes: 67108864, ranks: 8 }, all_gather: { bytes: 67108864, ranks: 8 },
  reduce_scatter: { bytes: 67108864, ranks: 8 }, all_to_all: { bytes: 67108864, ranks: 8 },
  send_recv: { bytes: 67108864 },
};
/** Forms that an operator's usual example does not show: quantised products, expert parallelism, whole modules. */
export const FORMS = {
  "linear, fp8 with scales per row": "linear:m=512,n=4096,k=4096,dtype=float8_e4m3,scaling=channel",
  "linear, fp8 with scales per block": "linear:m=512,n=4096,k=4096,dtype=float8_e4m3,scaling=block128",
  "linear, int8 (W8A8)": "linear:m=512,n=4096,k=4096,dtype=int8,scaling=channel",
  "linear, int8 weights": "linear:m=16,n=4096,k=4096,dtype=bfloat16,weight_dtype=int8",
  "linear, int4 weights": "linear:m=16,n=4096,k=4096,dtype=bfloat16,weight_dtype=int4",
  "linear, nvfp4": "linear:m=512,n=4096,k=4096,dtype=float4_e2m1,scaling=nvfp4",
  "moe, fp8 on 8 ranks": "moe:tokens=4096,hidden=7168,intermediate=2048,experts=256,topk=8,ep=8,balance=power_law_1.2,dtype=float8_e4m3,scaling=block128",
  "moe, mxfp4 weights": "moe:tokens=256,hidden=2880,intermediate=2880,experts=128,topk=4,dtype=bfloat16,weight_dtype=float4_e2m1",
  "mla_decode, fp8 cache": "mla_decode:batch=32,past_len=4096,heads=16,dtype=bfloat16,kv_dtype=float8_e4m3",
  "mla_decode, whole module": "mla_decode:batch=32,past_len=4096,heads=16,module=true,dtype=bfloat16",
  "attention_decode, fp8 cache": "attention_decode:batch=32,past_len=4096,heads=32,kv_heads=8,head_dim=128,dtype=bfloat16,kv_dtype=float8_e4m3",
  "all_reduce, two nodes": "all_reduce:bytes=67108864,ranks=16,ranks_per_node=8,library=nccl,dtype=bfloat16",
};

/** Split at commas, except inside parentheses such as min(a, b). */
function parts(text) {
  const split = [""];
  let depth = 0;
  for (const sign of text) {
    depth += sign === "(" ? 1 : sign === ")" ? -1 : 0;
    if (sign === "," && depth === 0) split.push("");
    else split[split.length - 1] += sign;
  }
  return split.map((part) => part.trim()).filter(Boolean);
}

function value(text) {
  if (/^(true|false)$/i.test(text)) return text.toLowerCase() === "true";
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

function template(text, support) {
  const [, name, rest] = /^([^:]*):?([^]*)$/.exec(text);
  const operator = name.trim();
  const known = support.operators[operator];
  if (!known) {
    const near = Object.keys(support.operators).filter((o) => operator && o.startsWith(operator[0]));
    throw new Error(`there is no operator "${operator}"; ${near.length ? `similar names: ${near.slice(0, 6).join(", ")}` : "the list of examples has all operators"}`);
  }
  const fields = { operator };
  for (const part of parts(rest)) {
    const cut = part.indexOf("=");
    const key = part.slice(0, cut).trim();
    if (cut < 1) throw new Error(`"${part}" is not key=value`);
    if (key in fields) throw new Error(`${key} is given twice`);
    if (!(key in known.fields)) throw new Error(`${operator} has no field ${key}; its fields are ${describe(operator, support)}`);
    fields[key] = value(part.slice(cut + 1).trim());
  }
  const missing = Object.keys(known.fields).filter((f) => known.fields[f] === "required" && !(f in fields));
  if (missing.length) throw new Error(`${operator} also needs ${missing.join(", ")}`);
  return fields;
}

const isSize = (name, field) => field === "required" || typeof field === "number";

/** Fields of an operator as text: "m, n, k, dtype=float32, bias=false, [scaling]"; brackets: without a default. */
export function describe(operator, support) {
  return Object.entries(support.operators[operator].fields)
    .map(([name, field]) => (field === "required" ? name : field === null ? `[${name}]` : `${name}=${field}`)).join(", ");
}

/** An example of an operator: usual sizes, and an element type without scaling that was trained under this protocol. */
export function example(operator, support, protocol) {
  const { fields, trained } = support.operators[operator];
  const types = trained.map((t) => t.split("/")).filter(([backend, , dtype]) => backend === "library" && !dtype.includes("+"));
  const type = (types.find((t) => t[1] === protocol) ?? types[0])?.[2] ?? fields.dtype;
  const sizes = Object.keys(fields).filter((f) => f in (OWN[operator] ?? {}) || (f in USUAL && isSize(f, fields[f])));
  const fieldTexts = sizes.map((f) => `${f}=${OWN[operator]?.[f] ?? USUAL[f]}`);
  return `${operator}:${[...fieldTexts, `dtype=${type}`].join(",")}`;
}

/**
 * Read the text field.
 *
 * Returns {variables, entries: [{template, program, count}], faults: [{line, message}]}; `template` keeps
 * expressions as text, `program` has their values.
 */
export function readOperators(text, support) {
  const variables = {}, entries = [], faults = [];
  text.split("\n").forEach((raw, i) => {
    const line = raw.replace(/#.*$/, "").trim();
    if (!line) return;
    const named = VARIABLE.exec(line);
    if (named) {
      variables[named[1]] = Number(named[2]);
      return;
    }
    try {
      const [, count, rest] = COUNTED.exec(line) ?? [null, "1", line];
      entries.push({ line: i + 1, count: Number(count), template: template(rest.trim(), support) });
    } catch (error) {
      faults.push({ line: i + 1, message: error.message });
    }
  });
  for (const entry of entries) {
    try {
      entry.program = substitute(entry.template, support, variables);
    } catch (error) {
      faults.push({ line: entry.line, message: error.message });
    }
  }
  return { variables, entries: entries.filter((e) => e.program), faults };
}

function substitute(fields, support, variables) {
  const known = support.operators[fields.operator].fields;
  return Object.fromEntries(Object.entries(fields).map(([name, field]) => {
    if (typeof field !== "string" || !isSize(name, known[name])) return [name, field];
    const size = evaluate(field, variables);
    if (!Number.isInteger(size)) throw new Error(`${name}: "${field}" is ${size}, not a whole number`);
    return [name, size];
  }));
}

/** Possible axes of a curve: [{name, value}], most useful first. */
export function axesOf({ variables, entries }, support) {
  const used = new Set(entries.flatMap((e) => Object.entries(e.template)
    .filter(([name, f]) => typeof f === "string" && isSize(name, support.operators[e.template.operator].fields[name]))
    .flatMap(([, f]) => namesIn(f))));
  const axes = [...used].map((name) => ({ name, value: variables[name], variable: true }));
  const fields = new Map();
  for (const { template: t, program } of entries) {
    for (const [name, field] of Object.entries(support.operators[t.operator].fields)) {
      if (!isSize(name, field) || NO_SIZES.includes(name)) continue;
      const size = name in program ? program[name] : field;
      const fixed = typeof (t[name] ?? field) !== "string" || !(name in t);
      const seen = fields.get(name);
      // A field is an axis only if all operators that have it have the same size: the axis replaces them all.
      fields.set(name, { name, value: size, ok: fixed && (seen === undefined || (seen.ok && seen.value === size)) });
    }
  }
  axes.push(...[...fields.values()].filter((f) => f.ok && !used.has(f.name)));
  const rank = ({ name, variable }) => (variable ? 0 : 10) + (BATCH_LIKE.indexOf(name) + BATCH_LIKE.length + 1) % (BATCH_LIKE.length + 1);
  return axes.map((axis, i) => ({ axis, key: 100 * rank(axis) + i })).sort((a, b) => a.key - b.key).map((e) => e.axis);
}

/** Maximum number of predictions in one request to /curve. */
const MOST_POINTS = 10000;

/** Powers of two up to four times a size, and the size itself; at most `most` values. */
export function axisValues(size, most = 18) {
  const top = Math.min(30, Math.max(6, Math.ceil(Math.log2(Math.max(size, 1))) + 2));
  const values = new Set([Math.max(1, size)]);
  for (let i = top; i >= 0 && values.size < Math.max(2, Math.min(most, 18)); i--) values.add(2 ** i);
  return [...values].sort((a, b) => a - b);
}

/** Programs and axes of POST /curve for one axis; other variables are replaced by numbers. */
export function curveQuery({ variables, entries }, axis, devices, support) {
  const others = { ...variables };
  // A variable may have the name of an operator's field, and an axis would replace that field: rename it.
  const taken = entries.some((e) => axis.name in support.operators[e.template.operator].fields);
  const name = axis.variable && taken ? `${axis.name}_` : axis.name;
  const programs = entries.map(({ template: t, program, count }) => {
    const templateFields = Object.entries(t).map(([field, text]) => {
      const moves = axis.variable && typeof text === "string" && text !== t.operator
        && isSize(field, support.operators[t.operator].fields[field]) && namesIn(text).includes(axis.name);
      if (!moves) return [field, program[field]];
      const rest = Object.keys(others).filter((v) => v !== axis.name);
      const fixed = rest.reduce((e, v) => e.replace(/[A-Za-z_]\w*/g, (w) => (w === v ? String(others[v]) : w)), text);
      return [field, renamed(fixed, axis.name, name)];
    });
    return { program: Object.fromEntries(templateFields), count };
  });
  return { programs, axes: { [name]: axisValues(axis.value, Math.floor(MOST_POINTS / (programs.length * devices))) }, name };
}
