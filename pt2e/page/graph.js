// Draws the graph around an operator, before and after quantization. A clicked node becomes the centre.

/** Shorten a text to its two ends if it is too long for its box. */
const shortened = (text, most) => (text.length > most ? `${text.slice(0, 12)}…${text.slice(13 - most)}` : text);

function drawNode(node, { x, y }, isCentre, attributes) {
  const lines = [
    ["what", node.operator.split(" ")[0], 25],
    ["name", node.format || node.name, 28],
    ["shape", node.shape, 31],
  ];
  const words = [node.operator, node.name, node.shape, node.format, node.module && `in ${node.module}`].filter(Boolean);
  return svg(
    "g", {
      ...attributes,
      class: `node${isCentre ? " centre" : ""}${node.format ? " mx" : ""}`,
      transform: `translate(${x} ${y})`,
      tabindex: 0,
      role: "button",
      "aria-label": words.join(", "),
      "aria-current": isCentre && "true",
    },
    svg("title", {}, words.join("\n")),
    svg("rect", { width: BOX.width, height: BOX.height, rx: 8 }),
    lines.map(([kind, text, most], i) => svg("text", { class: kind, x: 10, y: 20 + 17 * i }, shortened(text, most))),
  );
}

function drawEdge(from, to) {
  const [x1, y1, x2, y2] = [from.x + BOX.width / 2, from.y + BOX.height, to.x + BOX.width / 2, to.y];
  return svg("path", { class: "edge", d: `M${x1} ${y1}C${x1} ${y1 + 22} ${x2} ${y2 - 22} ${x2} ${y2}` });
}

/** One version of the model with a node in the centre; `go` is called with a clicked node. */
function drawGraph(form, centre, hops, go) {
  const panel = html("div", { class: "graph-panel" }, html("h3", {}, form === "before" ? "Before" : "After"));
  if (centre === null) {
    panel.append(html("p", { class: "muted" }, "This graph has no node for the operator."));
    return panel;
  }
  const nodes = graphs[form];
  const [shown, left] = neighbourhood(nodes, centre, hops);
  const [place, width, height] = positions(nodes, layersOf(nodes, shown));
  const edges = shown.flatMap((one) =>
    nodes[one].inputs.filter((input) => place.has(input)).map((input) => drawEdge(place.get(input), place.get(one))));
  const boxes = shown.map((one) => drawNode(nodes[one], place.get(one), one === centre, {
    click: () => go(one),
    keydown: (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      go(one);
    },
  }));
  const extent = { width: width + 4, height: height + 4, viewBox: `-2 -2 ${width + 4} ${height + 4}` };
  const drawing = svg("svg", { ...extent, role: "group", "aria-label": `${shown.length} nodes` }, edges, boxes);
  const scroll = html("div", { class: "scroll" }, drawing);
  requestAnimationFrame(() => {
    scroll.scrollLeft = place.get(centre).x + BOX.width / 2 - scroll.clientWidth / 2;
  });
  const save = downloads(scroll, `graph ${form}`);
  const rest = html("p", { class: "muted" }, `${count(left)} more neighbours are not shown`);
  panel.append(...present(scroll, left > 0 && rest, save));
  return panel;
}

/** Build the section; returns a function that shows an operator in it. */
function graphView(section) {
  const forms = Object.keys(graphs);
  const form = find("form", section);
  const reachable = operators.filter((operator) => operator.places.some((place) => place !== null));
  if (!reachable.length) return () => {};
  section.hidden = false;
  let centres = {};

  function draw(focus) {
    const panels = forms.map((name) => drawGraph(name, centres[name], Number(form.hops.value), (one) => {
      centres[name] = one;
      draw(name);
    }));
    find(".graphs", section).replaceChildren(...panels);
    if (focus) find(".node.centre", panels[forms.indexOf(focus)]).focus();
  }

  function choose(operator) {
    form.operator.value = String(operators.indexOf(operator));
    centres = { before: operator.places[0], after: operator.places[1] };
    draw();
  }

  form.operator.append(...reachable.map((operator) =>
    html("option", { value: operators.indexOf(operator) }, `${nameOf(operator)} (${operator.operator})`)));
  form.operator.addEventListener("change", () => choose(operators[form.operator.value]));
  form.hops.addEventListener("change", () => draw());
  form.addEventListener("submit", (event) => event.preventDefault());
  choose(reachable.find(isOutlier) ?? reachable.find((operator) => operator.quantized) ?? reachable[0]);
  return (operator) => {
    choose(operator);
    section.focus({ preventScroll: true });
    section.scrollIntoView();
  };
}
