// The runs, and one run's configuration and evaluations.
import { command, el, get, interval, link, number, table, told } from "./dom.js";

export async function runsView() {
  const { runs } = await get("runs");
  const rows = runs.map((run) => el("tr", {},
    el("td", {}, link(run.key, "run", { run: run.key })),
    el("td", {}, stateLabel(run.state)),
    el("td", {}, told(run.algorithm)),
    el("td", {}, told(run.environments.join(", "))),
    el("td", {}, Object.entries(run.policies).map(([name, model]) => el("div", {}, told(`${name}: ${model}`)))),
    el("td", { class: "number" }, number(run.iterations)),
    el("td", { class: "number" }, number(run.episodes)),
    el("td", { class: "number" }, number(run.reward), interval(run.ci95)),
    el("td", {}, link("curves", "curves", { run: run.key }), " ", link("episodes", "episodes", { run: run.key }))));
  const heads = ["run", "state", "algorithm", "environment", "policies", "iterations", "episodes", "last reward [95 %]", ""];
  return [el("h1", {}, "Runs"), table(heads, rows)];
}

export async function runView({ run }) {
  const found = await get("run", { run });
  const evaluations = found.evaluations.map((part) => el("tr", {},
    el("td", {}, told(part.file)), el("td", {}, told(part.environment ?? "")),
    el("td", { class: "number" }, number(part.episodes)),
    el("td", { class: "number" }, number(part.mean_reward), interval(part.ci95)),
    el("td", { class: "number" }, number(part.accuracy), interval(part.accuracy_ci95))));
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
