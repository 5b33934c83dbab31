// Parser of size expressions such as "tokens*12" and "ceil(tokens/128)". The language is that of POST /curve, so
// that one text gives both the prediction and the curve. Expressions are never evaluated as script.

const TOKEN = /\s*(?:(\d+(?:\.\d+)?)|([A-Za-z_]\w*)|(\/\/|[-+*/(),]))/y;
/** The service computes with exact fractions; rounding avoids ceil(10 * 0.7) = 8 here. */
const near = (value) => (Math.abs(value - Math.round(value)) < 1e-9 * Math.max(1, Math.abs(value)) ? Math.round(value) : value);
const FUNCTIONS = {
  ceil: (value) => Math.ceil(near(value)), floor: (value) => Math.floor(near(value)), min: Math.min, max: Math.max,
};

function tokens(text) {
  const parsed = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.trimEnd().length) {
    const start = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (!match) throw new Error(`"${text}": "${text.slice(start).trim()[0]}" is not allowed in a size`);
    const [, number, name, sign] = match;
    parsed.push(number !== undefined ? { number: Number(number) } : name ? { name } : { sign });
  }
  return parsed;
}

/** Variables of an expression. */
export function namesIn(text) {
  return tokens(text).map((t) => t.name).filter((name) => name && !Object.hasOwn(FUNCTIONS, name));
}

/** Rename the variable `from` to `to` in `text`. */
export function renamed(text, from, to) {
  return text.replace(/[A-Za-z_]\w*/g, (name) => (name === from ? to : name));
}

/** Evaluate `text` with `variables` (name to number); throws an Error with the fault. */
export function evaluate(text, variables) {
  const rest = tokens(text);
  const take = (...signs) => (signs.includes(rest[0]?.sign) ? rest.shift().sign : null);
  const need = (sign) => {
    if (!take(sign)) throw new Error(`"${text}": ${sign} is missing`);
  };
  function atom() {
    if (take("-")) return -atom();
    if (take("(")) {
      const value = sum();
      need(")");
      return value;
    }
    const token = rest.shift();
    if (token?.number !== undefined) return token.number;
    if (!token?.name) throw new Error(`"${text}" is incomplete or has a misplaced "${token?.sign ?? ""}"`);
    if (rest[0]?.sign === "(" && Object.hasOwn(FUNCTIONS, token.name)) {
      need("(");
      const values = [sum()];
      while (take(",")) values.push(sum());
      need(")");
      return FUNCTIONS[token.name](...values);
    }
    if (!Object.hasOwn(variables, token.name)) {
      throw new Error(`"${text}": ${token.name} has no value; add a line such as ${token.name} = 1024`);
    }
    return variables[token.name];
  }
  function product() {
    let value = atom();
    for (let sign; (sign = take("*", "/", "//")); ) {
      const right = atom();
      if (sign !== "*" && right === 0) throw new Error(`"${text}" divides by zero`);
      value = sign === "*" ? value * right : sign === "/" ? value / right : Math.floor(near(value / right));
    }
    return value;
  }
  function sum() {
    let value = product();
    for (let sign; (sign = take("+", "-")); ) value = sign === "+" ? value + product() : value - product();
    return value;
  }
  const value = sum();
  if (rest.length) throw new Error(`"${text}" has text after its end`);
  return near(value);
}
