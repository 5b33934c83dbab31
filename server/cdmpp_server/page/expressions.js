// Sizes as arithmetic: "tokens*12", "ceil(tokens/128)". The same language as POST /curve takes, so that one
// text gives both the prediction at a point and the curve. Parsed here, never evaluated as script.

const TOKEN = /\s*(?:(\d+(?:\.\d+)?)|([A-Za-z_]\w*)|(\/\/|[-+*/(),]))/y;
/** The service reckons in exact fractions; here ceil(10 * 0.7) must not be 8 for a last digit's sake. */
const near = (value) => (Math.abs(value - Math.round(value)) < 1e-9 * Math.max(1, Math.abs(value)) ? Math.round(value) : value);
const FUNCTIONS = {
  ceil: (value) => Math.ceil(near(value)), floor: (value) => Math.floor(near(value)), min: Math.min, max: Math.max,
};

function tokens(text) {
  const found = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.trimEnd().length) {
    const start = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (!match) throw new Error(`"${text}": "${text.slice(start).trim()[0]}" has no place in a size`);
    const [, number, name, sign] = match;
    found.push(number !== undefined ? { number: Number(number) } : name ? { name } : { sign });
  }
  return found;
}

/** Names that an expression uses, functions left out. */
export function namesIn(text) {
  return tokens(text).map((t) => t.name).filter((name) => name && !Object.hasOwn(FUNCTIONS, name));
}

/** `text` with the variable `from` called `to`. */
export function renamed(text, from, to) {
  return text.replace(/[A-Za-z_]\w*/g, (name) => (name === from ? to : name));
}

/** The value of `text`, with `variables` (name to number). Throws an Error that says what is wrong. */
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
    if (!token?.name) throw new Error(`"${text}" ends too early or misplaces "${token?.sign ?? ""}"`);
    if (rest[0]?.sign === "(" && Object.hasOwn(FUNCTIONS, token.name)) {
      need("(");
      const values = [sum()];
      while (take(",")) values.push(sum());
      need(")");
      return FUNCTIONS[token.name](...values);
    }
    if (!Object.hasOwn(variables, token.name)) {
      throw new Error(`"${text}": ${token.name} has no value; write ${token.name} = 1024 on a line of its own`);
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
  if (rest.length) throw new Error(`"${text}" goes on after its end`);
  return near(value);
}
