// The nodes around a node, in layers from inputs to users.

const BOX = { width: 208, height: 62, across: 18, down: 34 };
// most neighbours that are shown on each side of a node
const MOST_NEIGHBOURS = 6;

/** version of the model -> its nodes, with their users. */
const graphs = Object.fromEntries(Object.entries(data.graphs).map(([form, rows]) => {
  const nodes = rows.map(([name, operator, shape, format, module, inputs]) => (
    { name, operator, shape, format, module, inputs, readers: [] }));
  nodes.forEach((node, i) => node.inputs.forEach((input) => nodes[input].readers.push(i)));
  return [form, nodes];
}));

/** The indices of the nodes within some steps, in graph order, and how many were left out. */
function neighbourhood(nodes, centre, hops) {
  const found = new Set([centre]);
  let left = 0;
  let edge = [centre];
  for (let hop = 0; hop < hops; hop += 1) {
    const next = [];
    for (const one of edge) {
      for (const side of [nodes[one].inputs, nodes[one].readers]) {
        const fresh = side.filter((near) => !found.has(near));
        const kept = fresh.slice(0, MOST_NEIGHBOURS);
        left += fresh.length - kept.length;
        next.push(...kept);
        kept.forEach((near) => found.add(near));
      }
    }
    edge = next;
  }
  return [[...found].sort((a, b) => a - b), left];
}

/** Put each node one layer below its inputs, or without inputs just above its users. */
function layersOf(nodes, shown) {
  const inside = new Set(shown);
  const layer = new Map();
  const layersAt = (numbers) => numbers.filter((one) => inside.has(one)).map((one) => layer.get(one));
  for (const one of shown) layer.set(one, Math.max(-1, ...layersAt(nodes[one].inputs)) + 1);
  for (const one of [...shown].reverse()) {
    const below = layersAt(nodes[one].readers);
    if (below.length && !layersAt(nodes[one].inputs).length) layer.set(one, Math.min(...below) - 1);
  }
  const rows = [];
  for (const one of shown) (rows[layer.get(one)] ??= []).push(one);
  return rows.filter(Boolean);
}

/** The positions of the boxes, each near the middle of its inputs, and the size of the drawing. */
function positions(nodes, rows) {
  const [across, down] = [BOX.width + BOX.across, BOX.height + BOX.down];
  const width = Math.max(...rows.map((row) => row.length)) * across - BOX.across;
  const place = new Map();
  const wish = (one) => {
    const above = nodes[one].inputs.filter((input) => place.has(input)).map((input) => place.get(input).x);
    return above.length ? above.reduce((sum, x) => sum + x, 0) / above.length : width / 2;
  };
  rows.forEach((row, depth) => {
    const ordered = row.map((one) => [wish(one), one]).sort((a, b) => a[0] - b[0]);
    const start = (width - row.length * across + BOX.across) / 2;
    ordered.forEach(([, one], i) => place.set(one, { x: start + i * across, y: depth * down }));
  });
  return [place, width, rows.length * down - BOX.down];
}
