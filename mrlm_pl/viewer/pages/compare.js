// Two runs: their configurations, their rewards by task, and one task and seed side by side.
import { cell, choice, counted, el, estimate, filters, get, go, isExported, link, number, numberCell, table, told } from "./dom.js";
import { lanes, title } from "./episode.js";

const UNKNOWN = ", no 95 % interval (equal values or one task)";
const shownValue = (value) => (value === undefined ? "—" : typeof value === "string" ? value : JSON.stringify(value));

export async function compareView({ run, other }) {
  const { runs } = await get("runs");
  const keys = runs.map((item) => [item.key, item.key]);
  const one = run ?? keys[0]?.[0], two = other ?? keys.find(([key]) => key !== one)?.[0];
  if (!two) return [el("h1", {}, "Two runs"), el("p", {}, "Open two or more runs: `mrlm view RUN RUN`.")];
  const again = (changes) => go({ run: one, other: two, ...changes });
  const found = await get("compare", { run: one, other: two });
  return [
    el("h1", {}, "Two runs"),
    filters(choice("run", keys, one, (value) => again({ run: value })), choice("against", keys, two, (value) => again({ other: value }))),
    el("h2", {}, "Difference by task, with 95 % intervals"),
    found.newest || isExported ? el("p", { class: "note" }, `Compared are ${found.newest ? `the newest ${found.newest}` : "all"} stored episodes of each run${isExported ? ", also those that this page does not hold" : ""}.`) : null,
    found.evaluations.map((part) => el("p", {}, "Evaluation of ", told(part.environment), ": ",
      part.gain === undefined ? told(part.reason) : `${part.own_measure} ${number(part.own)} against ${number(part.other)}: gain ${estimate(part.gain, part.ci95, UNKNOWN)} over ${counted(part.tasks, "task")}`)),
    found.tasks ? el("p", {}, `Episodes: mean reward ${number(found.own)} against ${number(found.theirs)} over ${counted(found.tasks, "common task")}, paired by task: difference ${estimate(found.difference, found.ci95, UNKNOWN)}.`)
      : el("p", {}, "These episodes have no task in common."),
    found.rows.length ? table(["task", "reward", "against", "difference"], found.rows.map(([task, own, theirs]) => el("tr", {}, cell(told(task)), ...[own, theirs, own - theirs].map((value) => numberCell(value))))) : null,
    el("h2", {}, "Same task and seed"),
    found.pairs.length ? el("ul", {}, found.pairs.map((pair) => el("li", {}, link(`${pair.task}: ${number(pair.rewards[0])} against ${number(pair.rewards[1])}`, "pair", { run: one, id: pair.ids[0], other: two, second: pair.ids[1] })))) : found.pairs_left_out ? null : el("p", {}, "No task was played with the same seed in both."),
    found.pairs_left_out ? el("p", { class: "note" }, `${counted(found.pairs_left_out, "pair")} of episodes that this page does not hold: \`mrlm view RUN RUN\` shows them.`) : null,
    el("h2", {}, "Difference of the configurations"),
    found.settings.length ? table(["setting", "run", "against"], found.settings.map(([name, own, theirs]) => el("tr", {}, cell(el("code", {}, told(name))), cell(told(shownValue(own))), cell(told(shownValue(theirs)))))) : el("p", {}, "None."),
  ];
}

export async function pairView({ run, id, other, second }) {
  const records = await Promise.all([get("episode", { run, id }), get("episode", { run: other, id: second })]);
  return [el("h1", {}, "The same task and seed in two runs"),
    records.map((record, index) => el("section", {}, el("h2", {}, link(record.id, "episode", { run: [run, other][index], id: record.id }), " of ", told([run, other][index])), title(record), lanes(record)))];
}
