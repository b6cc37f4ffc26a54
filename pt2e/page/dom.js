"use strict";
// Builds elements and formats numbers. Text becomes text nodes only: no name is ever parsed as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const operators = data.operators;
/** module -> [candidate, operands, alone, left, estimate]; a map, for a module may be called "constructor". */
const sensitivities = new Map(Object.entries(data.sensitivity?.modules ?? {}));

/** The children without the false and null ones, which a condition left out. */
const present = (...children) => children.flat(Infinity).filter((child) => ![null, undefined, false].includes(child));

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (![null, undefined, false].includes(value)) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
}

const html = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);

const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** A table of rows (elements) below the names of its columns. */
const plainTable = (head, rows, caption) => html(
  "table", { class: "plain" }, caption && html("caption", {}, caption),
  html("thead", {}, html("tr", {}, head.map((name) => html("th", { scope: "col" }, name)))),
  html("tbody", {}, rows),
);

const find = (selector, within = document) => within.querySelector(selector);

const clamped = (value, ends) => Math.min(Math.max(value, Math.min(...ends)), Math.max(...ends));

/** A number of the data: null is missing, and text spells values that JSON lacks. */
const number = (value) => (value === null || value === undefined ? NaN : Number(value));

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** A size as [number, unit]: three digits. */
function size(bytes) {
  const power = bytes >= 1000 ? Math.min(Math.floor(Math.log10(bytes) / 3 + 1e-9), UNITS.length - 1) : 0;
  return [significant(bytes / 1000 ** power), UNITS[power]];
}

const sizeText = (bytes) => size(bytes).join(" ");

/** Three significant digits; words for values that are not finite. */
function significant(value, digits = 3) {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1).replace("-", "−");
  const whole = Math.floor(Math.log10(size || 1)) + 1;
  return value.toFixed(Math.max(digits - whole, 0)).replace("-", "−");
}

/** Four digits of the distance from 1, so that .9987 and .9991 differ. */
const qualityText = (value) => (value > 0.9 && value < 1 ? value.toFixed(4) : significant(value));

const decibels = (value) =>
  Number.isFinite(value) ? value.toFixed(1).replace("-", "−") : significant(value);

function percent(share) {
  if (share === 0) return "0";
  if (Number.isNaN(share)) return "–";
  return share < 0.0001 ? "< 0.01 %" : `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
}

/** 2⁻⁷ */
const powerOfTwo = (exponent) =>
  `2${String(exponent).replace(/./g, (digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)])}`;

const ENGLISH = new Intl.NumberFormat("en");

const count = (value) => ENGLISH.format(value);

/** A name that may wrap after each of its parts. */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part) => [part, html("wbr")]);

/** The name of an operator: its module, or its own name outside any module. */
const nameOf = (operator) => operator.module || operator.name;

/** The line of the model's source that calls an operator outside of any module. */
const atSource = (operator) => (operator.module || !operator.source ? "" : ` at ${operator.source}`);
