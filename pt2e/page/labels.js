// Labels of points that do not collide.

const PEN = html("canvas").getContext("2d");

/** The width of a label in pixels. */
function lengthOf(text, bold) {
  PEN.font = `${bold ? 600 : 400} 12px ${getComputedStyle(document.body).fontFamily}`;
  return PEN.measureText(text).width;
}

// distances of a label from its point; the outer ones get a line to it
const RINGS = [9, 22, 36, 52, 70];

/** A free position next to a point, [left, baseline, is far], inside a frame of [left, top, right, bottom]. */
function place(length, x, y, frame, taken) {
  for (const far of RINGS) {
    const aside = far * 0.7;
    const spots = [[x + far, y + 4], [x - length - far, y + 4], [x - length / 2, y - far - 1],
      [x - length / 2, y + far + 10], [x + aside, y - aside], [x + aside, y + aside + 9],
      [x - length - aside, y - aside], [x - length - aside, y + aside + 9]];
    for (const [left, baseline] of spots) {
      const box = [left - 2, baseline - 11, left + length + 2, baseline + 3];
      const inside = box[0] > frame[0] && box[1] > frame[1] && box[2] < frame[2] && box[3] < frame[3];
      if (inside && taken.every((one) => box[0] > one[2] || box[2] < one[0] || box[1] > one[3] || box[3] < one[1])) {
        taken.push(box);
        return [left, baseline, far > RINGS[0]];
      }
    }
  }
  return null;
}

/** Labels of points {x, y, label, bold} in pixels that avoid the boxes `taken` and each other; the bold ones first. */
function labelsOf(points, frame, taken) {
  const inTurn = points.filter((p) => p.label).sort((a, b) => Boolean(b.bold) - Boolean(a.bold));
  return inTurn.map(({ x, y, label, bold }) => {
    const length = lengthOf(label, bold);
    const spot = place(length, x, y, frame, taken);
    if (!spot) return null;
    const [left, baseline, far] = spot;
    const end = { x2: clamped(x, [left, left + length]), y2: baseline > y ? baseline - 11 : baseline + 3 };
    return [
      far && svg("line", { class: "leader", x1: x, y1: y, ...end }),
      svg("text", { class: bold ? "label bold" : "label", x: left, y: baseline }, label),
    ];
  });
}
