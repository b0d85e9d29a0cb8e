// The runs, and one run's main curves, configuration and evaluations.
import { AXES, charts, chosenNames } from "./curves.js";
import { cell, command, el, estimateCell, get, link, numberCell, table, told } from "./dom.js";

const MAIN_CURVES = 6;

// Return a table of runs; the columns in sight on a phone come first.
function summaries(runs) {
  const rows = runs.map((run) => el("tr", {},
    cell(link(run.key, "run", { run: run.key })),
    cell(stateLabel(run.state)),
    estimateCell(run.reward, run.ci95),
    numberCell(run.iterations),
    numberCell(run.episodes),
    cell(told(run.algorithm)),
    cell(told(run.environments.join(", "))),
    cell(Object.entries(run.policies).map(([name, model], _, all) => el("div", {}, told(all.length > 1 ? `${name}: ${model}` : model)))),
    el("td", { class: "whole" }, ["curves", "episodes", "health"].map((view) => [link(view, view, { run: run.key }), " "]))));
  return table(["run", "state", "last reward [95 %]", "iterations", "episodes", "algorithm", "environment", "policies", ""], rows);
}

export const runsView = async () => [el("h1", {}, "Runs"), summaries((await get("runs")).runs)];

export async function runView({ run }) {
  const [found, { runs, t }, metrics] = await Promise.all([get("run", { run }), get("runs"), get("metrics", { run })]);
  const own = runs.filter((item) => item.key === run);
  const names = chosenNames(Object.keys(metrics.columns), [metrics]).slice(0, MAIN_CURVES);
  const curves = charts(names, new Map([[run, own]]), { [run]: metrics }, AXES[0][0], t);
  const evaluations = found.evaluations.map((part) => el("tr", {},
    cell(told(part.file)), cell(told(part.environment ?? "")),
    numberCell(part.episodes),
    estimateCell(part.mean_reward, part.ci95),
    estimateCell(part.accuracy, part.accuracy_ci95)));
  return [
    el("h1", {}, "Run ", told(run)),
    summaries(own),
    found.state[1] ? stateLine(found.state) : null,
    found.resumed.length ? el("p", {}, `Resumed at iteration ${found.resumed.join(", ")}.`) : null,
    found.versions.length ? el("p", {}, "Versions: ", told(found.versions.join(", "))) : null,
    evaluations.length ? el("h2", {}, "Evaluations") : null,
    evaluations.length ? table(["file", "environment", "episodes", "reward [95 %]", "accuracy [95 %]"], evaluations) : null,
    command(["mrlm", "eval", "--model", found.named]),
    el("div", { class: "charts" }, curves),
    el("details", { open: !curves.length }, el("summary", {}, "Configuration"),
      el("pre", {}, told(found.configuration || "The run holds no config.yaml."))),
  ];
}

export const stateLabel = (state) => el("span", { class: `state ${state}` }, state);

// Return a line with the state of a run and its reason.
export const stateLine = ([state, reason]) => el("p", {}, stateLabel(state), reason ? told(`: ${reason}`) : null);
