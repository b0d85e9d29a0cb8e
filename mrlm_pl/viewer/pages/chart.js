// Line charts on SVG: lines, bands and vertical marks; the pointer or the arrow keys read the values.
import { el, number, visible } from "./dom.js";

const WIDTH = 460, HEIGHT = 214, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 38, DIGIT = 8;
const BEYOND = 0.5;  // of the lines' range: a wide band of few seeds is cut off, so that the lines keep half of the height

function shape(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  return low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : [low, high];
}

// Return the values of ticks with their texts, in as many digits as tell them apart; `least` is the smallest step.
function ticks([low, high], least = 0) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough));
  const found = [], digits = Math.min(100, Math.max(0, -Math.floor(Math.log10(step))));
  for (let index = Math.ceil(low / step); index * step <= high; index += 1) found.push([index * step, short(Number((index * step).toFixed(digits)))]);
  return found;
}

// Return a number in full, or with its power of ten where that is shorter.
function short(value) {
  const [whole, power] = [String(value), value.toExponential().replace("e+", "e")];
  return whole.length > 7 && power.length < whole.length ? power : whole;
}

// lines: [{name, points: [[x, y]], color, thin}]; bands: [{points: [[x, low, high]], color}]; marks: [{x, name}].
export function chart(title, lines, { bands = [], marks = [], unit = "" } = {}) {
  const xs = extent(lines.flatMap((line) => line.points.map((point) => point[0])));
  const [low, high] = extent(lines.flatMap((line) => line.points.map((point) => point[1]))), most = BEYOND * (high - low);
  const ys = extent([low, high, ...bands.flatMap((band) => band.points.flatMap((point) => [Math.max(low - most, point[1]), Math.min(high + most, point[2])]))]);
  const heights = ticks(ys), left = Math.max(LEFT, DIGIT * Math.max(...heights.map(([, text]) => text.length)) + 6);
  const atX = (x) => left + ((x - xs[0]) / (xs[1] - xs[0])) * (WIDTH - left - RIGHT);
  const atY = (y) => HEIGHT - BOTTOM - ((y - ys[0]) / (ys[1] - ys[0])) * (HEIGHT - TOP - BOTTOM);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", class: "chart" },
    shape("title", {}, visible(title)));
  for (const [value, text] of heights) {
    svg.append(shape("line", { x1: left, x2: WIDTH - RIGHT, y1: atY(value), y2: atY(value), class: "grid" }),
      shape("text", { x: left - 4, y: atY(value) + 4, class: "tick end" }, text));
  }
  const whole = lines.every((line) => line.points.every(([x]) => Number.isInteger(x)));
  for (const [value, text] of ticks(xs, whole ? 1 : 0)) {
    svg.append(shape("text", { x: atX(value), y: HEIGHT - 22, class: `tick ${atX(value) > WIDTH - LEFT / 2 ? "end" : "middle"}` }, text));
  }
  svg.append(shape("text", { x: (left + WIDTH - RIGHT) / 2, y: HEIGHT - 6, class: "unit middle" }, unit));
  for (const mark of marks) {
    svg.append(shape("line", { x1: atX(mark.x), x2: atX(mark.x), y1: TOP, y2: HEIGHT - BOTTOM, class: "mark" },
      shape("title", {}, visible(mark.name))));
  }
  const [width, height] = [WIDTH - left - RIGHT, HEIGHT - TOP - BOTTOM];
  const inside = shape("svg", { x: left, y: TOP, width, height, viewBox: `${left} ${TOP} ${width} ${height}` });
  svg.append(inside);
  for (const band of bands) {
    const edge = [...band.points.map(([x, , high]) => [x, high]), ...band.points.map(([x, low]) => [x, low]).reverse()];
    inside.append(shape("polygon", { points: edge.map(([x, y]) => `${atX(x)},${atY(y)}`).join(" "), class: `band color${band.color}` }));
  }
  for (const line of lines) {
    const place = line.points.map(([x, y]) => `${atX(x)},${atY(y)}`).join(" ");
    svg.append(line.points.length === 1
      ? shape("circle", { cx: atX(line.points[0][0]), cy: atY(line.points[0][1]), r: 2.5, class: `dot color${line.color}` })
      : shape("polyline", { points: place, class: `line color${line.color}${line.thin ? " thin" : ""}` }));
  }
  const cursor = shape("line", { x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" });
  svg.append(cursor);
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const all = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((one, other) => one - other);
  let at = all.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(all.length - 1, index));
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", atX(all[at]));
    cursor.setAttribute("x2", atX(all[at]));
    const parts = lines.map((line) => [line.name, line.points.find((point) => point[0] === all[at])]).filter(([, point]) => point);
    readout.replaceChildren(visible(`${unit} ${number(all[at])}: ${parts.map(([name, point]) => `${name} ${number(point[1])}`).join(", ")}`));
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = xs[0] + (((event.clientX - box.left) / box.width) * WIDTH - left) / (WIDTH - left - RIGHT) * (xs[1] - xs[0]);
    let best = 0;
    all.forEach((value, index) => { if (Math.abs(value - x) < Math.abs(all[best] - x)) best = index; });
    if (all.length) show(best);
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && all.length) { event.preventDefault(); show(at + step); }
  });
  return el("figure", {}, el("figcaption", {}, title), svg, readout);
}
