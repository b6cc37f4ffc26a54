// The details of an opened operator: statistics of its operands, candidates, the sensitivity of its module.

const fact = (name, value) => html("div", {}, html("dt", {}, name), html("dd", {}, value));

/** A table of a few columns; the first is a name. */
function smallTable(caption, head, rows) {
  const lines = rows.map(([name, ...cells]) => html(
    "tr", {}, html("th", { scope: "row" }, name), cells.map((cell) => html("td", {}, cell))));
  return html("div", { class: "scroll" }, plainTable(head, lines, caption));
}

/** An operand; several of one role are numbered. */
function operandCard(operand, all) {
  const same = all.filter((one) => one.role === operand.role);
  const title = same.length > 1 ? `${operand.role} ${same.indexOf(operand) + 1}` : operand.role;
  const seen = operand.seen;
  const [sqnr, saturated, flushed] = seen ? seen.noise.map(number) : [];
  const counted = seen && !Number.isNaN(saturated); // without calibration only the noise is known
  const facts = [
    seen && fact("SQNR", `${decibels(sqnr)} dB`),
    counted && fact("saturated", percent(saturated)),
    counted && fact("flushed", percent(flushed)),
    seen && fact("values seen", count(seen.values)),
    seen?.nonfinite > 0 && fact("Inf or NaN", `${count(seen.nonfinite)}, in ${count(seen.nanBlocks)} blocks`),
    operand.tensorScale && fact("tensor scale", `${significant(operand.tensorScale)}, from calibration`),
    operand.before > 0 && fact("bytes", `${count(operand.before)} → ${count(operand.after)}`),
  ];
  const rows = operand.candidates.map(([name, ...noise]) => {
    const [db, beyond, zero] = noise.map(number);
    return [name, decibels(db), percent(beyond), percent(zero)];
  });
  return html(
    "section", { class: "card" },
    html("h4", {}, title, " ", html("span", { class: "format" }, operand.spec ?? "high precision")),
    html("dl", { class: "facts" }, facts),
    operand.spec && !seen && html("p", { class: "muted" }, "no calibration statistics"),
    counted && histogram(seen.exponents),
    rows.length > 0 && smallTable("candidates", ["format", "dB", "saturated", "flushed"], rows),
  );
}

function sensitivityCard(rows) {
  const head = ["this alone", "all but this", "estimate"];
  const kept = [2, 3, 4].filter((i) => rows.some((row) => row[i] !== "NaN")); // what was measured
  return html(
    "section", { class: "card" }, html("h4", {}, "sensitivity"),
    smallTable(
      `cost to the output (${data.sensitivity.metric}) of quantizing the module`,
      ["candidate", ...kept.map((i) => head[i - 2])],
      rows.map((row) => [`${row[0]}, ${row[1]}`, ...kept.map((i) => significant(number(row[i])))]),
    ),
  );
}

function details(operator, showGraph) {
  const shown = operator.operands.filter((operand) => operand.spec || operand.before);
  const sensitive = sensitivities.get(operator.module);
  const inGraph = operator.places.some((place) => place !== null);
  return html(
    "div", { class: "details" },
    operator.notes && html("p", { class: "notes" }, operator.notes),
    html(
      "div", { class: "cards" }, shown.map((operand) => operandCard(operand, shown)),
      sensitive && sensitivityCard(sensitive),
    ),
    inGraph && html("button", { type: "button", click: () => showGraph(operator) }, "Show its neighbours in the graph"),
  );
}
