// The table of operators, with sorting, filtering and rows that open.

const lowest = (operator, role) => {
  const found = operator.operands.filter((o) => o.role === role && o.seen).map((o) => number(o.seen.noise[0]));
  return found.length ? Math.min(...found) : null;
};
const formats = (operator, role) =>
  [...new Set(operator.operands.filter((o) => o.role === role).map((o) => o.spec ?? "–"))].join(" / ");
const bytes = (operator, which) => operator.operands.reduce((sum, operand) => sum + operand[which], 0) || null;
const isOutlier = (operator) => operator.operands.some((operand) => operand.below !== null);

/** The cost of a module in the candidate that the table shows. */
function cost(operator) {
  const rows = (sensitivities.get(operator.module) ?? []).filter(([name]) => name === data.sensitivity.worst);
  const costs = rows.map(([, , alone, , estimate]) => number(alone === "NaN" ? estimate : alone));
  return costs.length ? Math.max(...costs) : null;
}

// the bar of a ratio, and the decibels at which it is full
const BAR = { width: 36, height: 6, rx: 3 };
const FULL = 60;

const measured = (value) => html(
  "span", { class: "measure" }, decibels(value),
  svg("svg", { width: BAR.width, height: BAR.height, "aria-hidden": "true" },
    svg("rect", { class: "track", ...BAR }),
    svg("rect", { ...BAR, width: clamped(value / FULL || 0, [0, 1]) * BAR.width })),
);

// each: heading, sort value, shown text
const COLUMNS = [
  { name: "operator", value: (o) => `${o.module} ${o.name}`, text: true },
  { name: "weight", value: (o) => formats(o, "weight"), text: true },
  { name: "SQNR, weight", value: (o) => lowest(o, "weight"), show: measured },
  { name: "activation", value: (o) => formats(o, "activation"), text: true },
  { name: "SQNR, activation", value: (o) => lowest(o, "activation"), show: measured },
  { name: "bytes", value: (o) => bytes(o, "before"), show: count },
  { name: "after", value: (o) => bytes(o, "after"), show: count },
  { name: `cost in ${data.sensitivity?.worst}`, value: cost, show: significant },
].slice(0, data.sensitivity ? 8 : 7);

const KINDS = {
  "all operators": () => true,
  quantized: (o) => o.quantized,
  "left in high precision": (o) => !o.quantized,
  outliers: isOutlier,
  "with a remark": (o) => o.notes !== "",
};

/** Compare numbers by size, NaN after them, texts in natural order, and missing values last. */
function compare(a, b, direction) {
  const absent = (value) => value === null || value === "" || Number.isNaN(value);
  if (absent(a) || absent(b)) return absent(a) - absent(b);
  if (typeof a === "number") return a === b ? 0 : direction * (a < b ? -1 : 1);
  return direction * ORDER.compare(a, b);
}
const ORDER = new Intl.Collator("en", { numeric: true });

function operatorTable(showGraph) {
  const form = find("#operators form");
  const table = find("table.operators");
  const body = html("tbody", { role: "rowgroup" });
  let sorted = { column: -1, direction: 0 };

  const entries = operators.map((operator, index) => {
    const values = COLUMNS.map((column) => column.value(operator));
    const button = html(
      "button", { type: "button", class: "open", "aria-expanded": "false", "aria-controls": `details-${index}` },
      html("span", {}, breakable(nameOf(operator))),
    );
    const cells = COLUMNS.slice(1).map((column, i) => html(
      "td", { role: "cell", "data-name": column.name, class: column.text ? "format" : "number" },
      column.show ? values[i + 1] !== null && column.show(values[i + 1]) : values[i + 1]));
    const row = html(
      "tr", { role: "row", class: operator.quantized ? "row" : "row left" },
      html("th", { role: "rowheader", scope: "row" }, button, html("span", { class: "kind" }, operator.operator, atSource(operator)),
        isOutlier(operator) && html("span", { class: "badge bad" }, "outlier"),
        !operator.quantized && html("span", { class: "reason" }, operator.notes)),
      cells,
    );
    const entry = { operator, index, values, row, button, more: null };
    const { module, name, operator: kind, notes, source } = operator;
    entry.words = [module, name, kind, notes, source, ...values].join(" ").toLowerCase();
    row.addEventListener("click", () => { if (!String(getSelection())) toggle(entry); });
    return entry;
  });

  function toggle(entry, wanted = entry.button.ariaExpanded !== "true") {
    entry.button.ariaExpanded = String(wanted);
    if (wanted && !entry.more) {
      entry.more = html("tr", { role: "row", class: "more", id: `details-${entry.index}` },
        html("td", { role: "cell", colspan: COLUMNS.length }, details(entry.operator, showGraph)));
      entry.row.after(entry.more);
    }
    if (entry.more) entry.more.hidden = !wanted;
  }

  function arrange() {
    const order = [...entries]; // in execution order, which a sort keeps among equals
    if (sorted.direction) {
      order.sort((a, b) => compare(a.values[sorted.column], b.values[sorted.column], sorted.direction));
    }
    body.append(...order.flatMap((entry) => (entry.more ? [entry.row, entry.more] : [entry.row])));
    headings.forEach((heading, i) => {
      const direction = i === sorted.column ? sorted.direction : 0;
      heading.setAttribute("aria-sort", ["descending", "none", "ascending"][direction + 1]);
    });
  }

  function filter() {
    const words = form.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { operator, words: text, row, more, button } of entries) {
      row.hidden = !KINDS[form.kind.value](operator) || !words.every((word) => text.includes(word));
      if (more) more.hidden = row.hidden || button.ariaExpanded !== "true";
      shown += !row.hidden;
    }
    form.querySelector("output").textContent = `${count(shown)} of ${count(entries.length)} operators`;
  }

  // first click ascending, second descending, third execution order
  const NEXT = { 0: 1, 1: -1, "-1": 0 };
  const headings = COLUMNS.map(({ name, text }, column) => html(
    "th", { role: "columnheader", scope: "col", "aria-sort": "none", class: text ? "" : "number" },
    html("button", { type: "button", click: () => {
      sorted = { column, direction: sorted.column === column ? NEXT[sorted.direction] : 1 };
      arrange();
    } }, name),
  ));

  table.setAttribute("role", "table");
  table.append(
    html("caption", {}, "Open a row for its histograms. Click a heading to sort; click a third time to reset."),
    html("thead", { role: "rowgroup" }, html("tr", { role: "row" }, headings)), body);
  form.kind.append(...Object.entries(KINDS).map(([name, keeps]) => {
    const size = operators.filter(keeps).length;
    return html("option", { value: name, disabled: size === 0 }, `${name} (${count(size)})`);
  }));
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  arrange();
  filter();

  /** Show an operator, opened and focused, whatever the filter hid. */
  return function open(index) {
    const entry = entries[index];
    if (entry.row.hidden) {
      form.reset();
      filter();
    }
    toggle(entry, true);
    entry.button.focus({ preventScroll: true });
    entry.row.scrollIntoView({ block: "center" });
  };
}
