// The state of a run: staleness, mismatch, retries, waiting.
import { chart } from "./chart.js";
import { isConstant, points } from "./curves.js";
import { cell, counted, el, get, link, number, numberCell, table, told } from "./dom.js";
import { stateLabel, stateLine } from "./runs.js";

const WATCHED = /(^async\/|(^|[/_])(lag|stale|mismatch|retries|failed|restarts|dropped|resampled|truncated|queue|wait|seconds|leases?|tokens_per_second|grad_norm|zero_variance)([/_]|$))/;

const MISMATCH = ["k1", "k3", "effective_share", "max_ratio"];

// Return the last logged distances of each policy's learner from its sampler.
function mismatches(columns, only) {
  const policies = Object.keys(columns).map((name) => /^train\/(?:(.+)\/)?mismatch_k3$/.exec(name)).filter((found) => found);
  return policies.map(([name, policy]) => [policy ?? only, ...MISMATCH.map((measure) => columns[name.replace(/k3$/, measure)]?.findLast((value) => value !== null))]);
}

export async function healthView({ run }) {
  const { runs } = await get("runs");
  if (!run) return [el("h1", {}, "Health"), el("ul", {}, runs.map((item) => el("li", {}, link(item.key, "health", { run: item.key }), ": ", stateLabel(item.state), item.failed ? `, ${counted(item.failed, "failed episode")}` : "")))];
  const [found, { columns, resumed }, { state }] = await Promise.all(["health", "metrics", "run"].map((path) => get(path, { run })));
  const { policies } = runs.find((item) => item.key === run);
  const names = Object.keys(columns).filter((name) => WATCHED.test(name) && name !== "progress/seconds" && columns[name].some((value) => value !== null)).sort();
  const changing = names.filter((name) => !isConstant(columns[name]));
  const distances = mismatches(columns, Object.keys(policies)[0] ?? "");
  const constant = names.filter((name) => !changing.includes(name));
  return [
    el("h1", {}, "Health of ", link(run, "run", { run })),
    stateLine(state),
    el("p", {}, `The newest ${counted(found.episodes, "episode")}: ${found.failed} failed, ${found.retries} retries, ${found.truncated} truncated by a limit, ${found.restarts} rewritten histories, ${found.tool_failures} with tool failures.`),
    Object.keys(found.seconds).length ? el("p", {}, `Mean seconds of an episode by phase, including its waits for other episodes: ${Object.entries(found.seconds).map(([name, value]) => `${name} ${number(value)}`).join(", ")}.`) : null,
    el("h2", {}, "Mismatch of sampler and learner by policy"),
    distances.length ? table(["policy", "KL (k1)", "KL (k3)", "effective share", "largest ratio"], distances.map(([policy, ...values]) => el("tr", {}, cell(told(policy)), values.map((value) => numberCell(value))))) : el("p", {}, "None is logged."),
    el("h2", {}, "Turns by agent, turn and version"),
    el("p", { class: "note" }, "Staleness: optimizer steps between the weights that sampled a turn and the newest ones of its iteration."),
    table(["agent", "turn", "version", "turns", "staleness", "tokens", "fraction truncated at max_tokens"], found.turns.map((row) => el("tr", {}, cell(told(row[0])), ...row.slice(1).map((value) => numberCell(value))))),
    el("h2", {}, "Logged numbers"),
    names.length ? null : el("p", {}, "None."),
    constant.length ? el("p", {}, `Constant: ${constant.map((name) => `${name} ${number(columns[name].find((value) => value !== null))}`).join(", ")}.`) : null,
    el("div", { class: "charts" }, changing.map((name) => chart(name, [{ name: run, points: points(columns, "progress/iteration", name), color: 0 }],
      { marks: resumed.map((x) => ({ x, name: `resumed at iteration ${x}` })), unit: "iteration" }))),
  ];
}
