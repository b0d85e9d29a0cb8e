// The runs, and one run's configuration and evaluations.
import { cell, command, el, get, interval, link, numberCell, table, told } from "./dom.js";

export async function runsView() {
  const { runs } = await get("runs");
  const rows = runs.map((run) => el("tr", {},
    cell(link(run.key, "run", { run: run.key })),
    cell(stateLabel(run.state)),
    cell(told(run.algorithm)),
    cell(told(run.environments.join(", "))),
    cell(Object.entries(run.policies).map(([name, model]) => el("div", {}, told(`${name}: ${model}`)))),
    numberCell(run.iterations),
    numberCell(run.episodes),
    numberCell(run.reward, interval(run.ci95)),
    cell(link("curves", "curves", { run: run.key }), " ", link("episodes", "episodes", { run: run.key }))));
  const heads = ["run", "state", "algorithm", "environment", "policies", "iterations", "episodes", "last reward [95 %]", ""];
  return [el("h1", {}, "Runs"), table(heads, rows)];
}

export async function runView({ run }) {
  const found = await get("run", { run });
  const evaluations = found.evaluations.map((part) => el("tr", {},
    cell(told(part.file)), cell(told(part.environment ?? "")),
    numberCell(part.episodes),
    numberCell(part.mean_reward, interval(part.ci95)),
    numberCell(part.accuracy, interval(part.accuracy_ci95))));
  return [
    el("h1", {}, "Run ", told(run)),
    stateLine(found.state),
    el("p", {}, link("Curves", "curves", { run }), " · ", link("Episodes", "episodes", { run })),
    found.resumed.length ? el("p", {}, `Resumed at iteration ${found.resumed.join(", ")}.`) : null,
    found.versions.length ? el("p", {}, "Versions: ", told(found.versions.join(", "))) : null,
    evaluations.length ? el("h2", {}, "Evaluations") : null,
    evaluations.length ? table(["file", "environment", "episodes", "reward [95 %]", "accuracy [95 %]"], evaluations) : null,
    command(["mrlm", "eval", "--model", found.named]),
    el("h2", {}, "Configuration"),
    el("pre", {}, told(found.configuration || "The run holds no config.yaml.")),
  ];
}

export const stateLabel = (state) => el("span", { class: `state ${state}` }, state);

// Return a line with the state of a run and its reason.
export const stateLine = ([state, reason]) => el("p", {}, stateLabel(state), reason ? told(`: ${reason}`) : null);
