// Helpers that create elements. Text is never parsed as markup, because names come from untrusted files.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Mark of a domain: a shape and a word, so that it does not depend on colour. */
const DOMAINS = {
  in: ["●", "the training data has this device, operator, type and protocol together, with similar sizes"],
  near: ["◐", "one of device, operator, type, protocol or size is new to the model, or their combination is"],
  out: ["○", "extrapolation: several properties are new to the model"],
};

export const DOMAIN_ORDER = Object.keys(DOMAINS);

/** One line for each of the domains: its mark and its meaning. */
export function domainLegend(domains) {
  return DOMAIN_ORDER.filter((d) => domains.includes(d)).map((d) => html("li", {}, domainMark(d), `: ${DOMAINS[d][1]}`));
}

/** The mark; `reason` is the domain_reason of the figure. */
export function domainMark(domain, reason = null) {
  const [sign, meaning] = DOMAINS[domain] ?? ["–", ""];
  return html("span", { class: `domain ${domain ?? ""}`, title: reason ?? meaning },
    html("span", { "aria-hidden": "true" }, sign), ` ${domain ?? "none"}`);
}

/** `text` as a sentence: with a full stop. */
const sentence = (text) => (/[.!?…]$/.test(text) ? text : `${text}.`);

/** Message and hint of an error, each a sentence. */
export function errorText(error) {
  return html("span", { class: "fault" }, sentence(error.message ?? String(error)),
    error.hint ? html("span", { class: "hint" }, ` Hint: ${sentence(error.hint)}`) : null);
}

/** Head of a table; names of text columns begin with a blank. */
export function tableHead(names, attributes = {}) {
  return html("thead", {}, html("tr", {}, ...names.map((name) =>
    html("th", { scope: "col", class: name.startsWith(" ") ? "text" : null, ...attributes }, name.trim()))));
}

/** Value of a number field; throws {message} unless it is a whole number of at least 1, or with step "any" positive. */
export function numberOf(field, name) {
  const value = Number(field.value), any = field.step === "any";
  if (any ? value > 0 : Number.isInteger(value) && value >= 1) return value;
  throw { message: any ? `${name} must be a number above 0.` : `${name} must be a whole number of at least 1.` };
}
