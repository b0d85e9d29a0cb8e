// Logged numbers over iterations, episodes, tokens or seconds; seeds of one configuration as a band.
import { chart } from "./chart.js";
import { choice, el, filters, get, go, remember, told } from "./dom.js";

export const AXES = [["progress/iteration", "iterations"], ["progress/episodes", "episodes"],
  ["progress/generated_tokens", "tokens"], ["progress/seconds", "seconds"], ["step", "steps"]];
const MAIN = /^(rollout\/(reward|success|entropy|response_tokens|zero_variance_groups|agent\/[^/]+\/reward)|validation\/|train\/(.+\/)?(kl|loss|approx_kl|grad_norm)$)/;
const OWN = /^(rollout\/(?!agent\/|policy\/|stop\/)[^/]+\/[^/]+$|(?!(rollout|train|val|test|progress)\/|step$|epoch$))/;
const MOST = 24;
const NOISE = 1e-9;
const COLORS = 6;

// Return the class of a family's lines: a color, and dashes once the colors are used up.
const shade = (family) => `${family % COLORS}${family < COLORS ? "" : " again"}`;

// Return whether the numbers of a column are equal, but for rounding.
export function isConstant(column) {
  const values = column.filter((value) => value !== null);
  return values.every((value) => Math.abs(value - values[0]) < NOISE);
}

// Return the points of a column over an axis; several updates of an iteration are one point, their mean.
export function points(columns, axis, name) {
  const xs = columns[axis], found = new Map();
  (columns[name] ?? []).forEach((y, row) => {
    const x = xs ? xs[row] : row;
    if (x !== null && y !== null) found.set(x, [...(found.get(x) ?? []), y]);
  });
  return [...found].map(([x, ys]) => [x, ys.reduce((sum, y) => sum + y, 0) / ys.length]);
}

// Return the names that a page without a filter shows: the reward and the other main ones, then the numbers of environments (components of
// the reward) and callbacks, constant ones last.
export function chosenNames(names, runs) {
  const rank = new Map(names.map((name) => [name, 3 * isConstant(runs.flatMap((run) => run.columns[name] ?? [])) + (name === "rollout/reward" ? 0 : MAIN.test(name) ? 1 : 2)]));
  return names.filter((name) => MAIN.test(name) || OWN.test(name)).sort((one, other) => rank.get(one) - rank.get(other));
}

// Return mean and 95 % interval over seeds, row by row, where two or more have a value.
export function band(seeds, quantiles) {
  const found = { mean: [], interval: [] };
  for (let row = 0; row < Math.max(...seeds.map((seed) => seed.length)); row += 1) {
    const present = seeds.filter((seed) => row < seed.length).map((seed) => seed[row]);
    const count = present.length;
    const x = present.reduce((sum, point) => sum + point[0], 0) / count;
    const y = present.reduce((sum, point) => sum + point[1], 0) / count;
    found.mean.push([x, y]);
    if (count > 1) {
      const spread = Math.sqrt(present.reduce((sum, point) => sum + (point[1] - y) ** 2, 0) / (count - 1) / count);
      const half = quantiles[Math.min(count - 2, quantiles.length - 1)] * spread;
      found.interval.push([x, y - half, y + half]);
    }
  }
  return found;
}

// Return a chart of each name: the seeds of a family in one color. `data` has the metrics of runs by key.
export function charts(names, families, data, axis, t) {
  return names.map((name) => {
    const lines = [], bands = [], marks = [];
    [...families.values()].forEach((family, color) => {
      const seeds = family.map((run) => points(data[run.key].columns, axis, name));
      const several = seeds.filter((seed) => seed.length).length > 1;
      family.forEach((run, index) => {
        if (seeds[index].length) lines.push({ name: several ? `seed ${run.seed ?? run.key}` : run.key, points: seeds[index], color: shade(color), thin: several });
        for (const iteration of data[run.key].resumed) {
          const row = (data[run.key].columns["progress/iteration"] ?? []).findIndex((value) => value > iteration);
          const x = data[run.key].columns[axis]?.[row];
          if (row >= 0 && x !== null && x !== undefined) marks.push({ x, name: `${run.key} resumed at iteration ${iteration}` });
        }
      });
      if (several) {
        const found = band(seeds.filter((seed) => seed.length), t);
        lines.push({ name: "mean", points: found.mean, color: shade(color) });
        bands.push({ points: found.interval, color: shade(color) });
      }
    });
    const gaps = Object.values(data).reduce((sum, run) => sum + (run.not_finite[name] ?? 0), 0);
    return chart(gaps ? `${name} (${gaps} NaN or infinite)` : name, lines, { bands, marks, unit: AXES.find(([key]) => key === axis)?.[1] });
  });
}

export async function curvesView(parameters) {
  const { runs, t } = await get("runs");
  const chosen = new Set(parameters.runs ? JSON.parse(parameters.runs) : parameters.run ? [parameters.run] : runs.map((run) => run.key));
  const axis = parameters.axis || AXES[0][0];
  const data = Object.fromEntries(await Promise.all(runs.filter((run) => chosen.has(run.key))
    .map(async (run) => [run.key, await get("metrics", { run: run.key })])));
  const families = new Map();
  for (const run of runs.filter((item) => item.key in data)) families.set(run.family, [...(families.get(run.family) ?? []), run]);
  const names = [...new Set(Object.values(data).flatMap((run) => Object.keys(run.columns)))].filter((name) => !name.startsWith("progress/")).sort();
  const box = el("div", { class: "charts" });

  function draw(pattern) {
    const words = pattern.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = words.length ? names.filter((name) => words.every((word) => name.toLowerCase().includes(word)))
      : chosenNames(names, Object.values(data));
    box.replaceChildren(...charts(shown.slice(0, MOST), families, data, axis, t), el("p", {}, shown.length > MOST ? `${MOST} of ${shown.length} shown; filter by name` : shown.length ? "" : words.length ? "No number has this name." : "No number is logged."));
  }

  const filter = el("input", { type: "search", value: parameters.filter ?? "", placeholder: "filter by name, as in agent reward",
    "aria-label": "filter by name", on: { input: () => { remember({ filter: filter.value }); draw(filter.value); } } });
  draw(filter.value);
  const every = Math.max(1, ...Object.values(data).map((run) => run.every));
  return [
    el("h1", {}, "Curves"),
    filters(filter,
      choice("over", AXES, axis, (value) => go({ axis: value })),
      el("fieldset", {}, el("legend", {}, "runs"), runs.map((run) => el("label", {},
        el("input", { type: "checkbox", checked: chosen.has(run.key), on: { change: (event) => {
          if (event.target.checked) chosen.add(run.key); else chosen.delete(run.key);
          go({ runs: JSON.stringify([...chosen]) });
        } } }), run.key in data ? el("span", { class: `swatch color${shade([...families.keys()].indexOf(run.family))}` }) : null, told(run.key))))),
    el("p", { class: "note" }, "Runs that differ in their seed alone share a color: thin lines, with mean and 95 % interval. Vertical dashes: a resumption.",
      every > 1 ? ` Of the longest column every ${every}th number is shown.` : ""),
    box,
  ];
}
