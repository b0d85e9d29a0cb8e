// The credit of each turn, by agent; and the branches of a turn tree.
import { cell, command, el, estimateCell, get, link, number, numberCell, table, told } from "./dom.js";
import { unpack } from "./episodes.js";

const CREDIT = ["return", "baseline", "advantage"];
const ASKED = 20;

// Return how the stored numbers of the turns are related, in words.
export function formula(turns) {
  const known = (turn, names) => names.every((name) => typeof turn[name] === "number");
  const whole = turns.filter((turn) => known(turn, CREDIT));
  if (!turns.some((turn) => known(turn, ["advantage"]))) return "The record holds no advantages: the episode was not trained on, or it was written by an older version.";
  const close = (one, other) => Math.abs(one - other) <= 1e-5 * Math.max(1, Math.abs(one), Math.abs(other));
  const plain = turns.filter((turn) => known(turn, ["return", "advantage"]));
  if (!whole.length && plain.length && plain.every((turn) => close(turn.return, turn.advantage))) return "advantage = return";
  if (!whole.length) return "advantage: as the algorithm computed it; the record holds no baseline of single turns";
  if (whole.every((turn) => close(turn.advantage, turn.return - turn.baseline))) return "advantage = return − baseline";
  const ratios = whole.filter((turn) => !close(turn.return, turn.baseline)).map((turn) => turn.advantage / (turn.return - turn.baseline));
  if (ratios.length && ratios.every((ratio) => Math.abs(ratio - ratios[0]) <= 1e-3 * Math.abs(ratios[0]))) {
    return `advantage = (return − baseline) × ${number(ratios[0])}${ratios.length > 1 ? ", the same factor for all turns with an advantage" : ""}`;
  }
  return "advantage = return − baseline, then normalized or weighted by the algorithm; the factor differs from turn to turn";
}

function branches(tree, run, id) {
  const said = new Map(tree.decisions.map((turn) => [`${turn.node}/${turn.agent}/${turn.sample}`, turn]));
  const children = new Map();
  for (const action of tree.actions) children.set(action.node, [...(children.get(action.node) ?? []), action]);
  const states = new Set(tree.actions.map((action) => action.name));
  const onPath = new Set();
  for (let action = tree.actions.find((item) => item.name === id); action; action = tree.actions.find((item) => item.name === action.node)) onPath.add(action.name);
  const branch = (action) => {
    const line = [Object.entries(action.decisions).map(([agent, sample]) => {
      const turn = said.get(`${action.node}/${agent}/${sample}`);
      return el("span", { class: "decision" }, el("b", {}, told(agent), ` ${sample}: `), told(turn?.text ?? ""),
        CREDIT.filter((name) => typeof turn?.[name] === "number").map((name) => ` · ${name} ${number(turn[name])}`));
    }), action.rewards && Object.keys(action.rewards).length ? el("span", {}, `rewards ${Object.entries(action.rewards).map(([agent, value]) => `${agent} ${number(value)}`).join(", ")}`) : null,
    action.failed ? el("span", { class: "bad" }, "failed") : null];
    const below = children.get(action.name);
    if (!below) return el("li", { class: onPath.has(action.name) ? "own" : "" }, line, " ", link(action.path, "episode", { run, id: action.path }));
    const list = el("ul", {});
    const details = el("details", { open: onPath.has(action.name) }, el("summary", { class: onPath.has(action.name) ? "own" : "" }, line, ` (${below.length} branches)`), list);
    const fill = () => { if (details.open && !list.childNodes.length) list.append(...below.map(branch)); };
    details.addEventListener("toggle", fill);
    fill();
    return el("li", {}, details);
  };
  const roots = tree.actions.filter((action) => !states.has(action.node));
  return el("ul", { class: "tree" }, roots.map(branch));
}

// Return the commands that ask for the value of other decisions at the turns of an episode, folded.
export function whatifCommands(record, id) {
  const turns = Object.values(record.trajectories).flat().flatMap((row) => row.turns);
  if (!record.played || !turns.length) return null;
  const file = (turn) => `${record.played}/whatif/${`${id}-${turn.agent}-${turn.index}`.replace(/[^\w.-]/g, "_")}.json`;
  const ask = (turn) => command(["mrlm", "whatif", record.played, "--episode", id, "--agent", turn.agent, "--turn", String(turn.index), "--output", file(turn)]);
  return el("details", {}, el("summary", {}, "commands that ask for the value of other decisions"), turns.slice(0, ASKED).map(ask));
}

export async function creditView({ run, id }) {
  const record = await get("episode", { run, id });
  const rows = Object.values(record.trajectories).flat();
  const turns = rows.flatMap((row) => row.turns);
  const names = CREDIT.filter((name) => turns.some((turn) => typeof turn[name] === "number"));
  const lines = rows.flatMap((row) => row.turns.map((turn) => [row, turn])).sort(([, one], [, other]) => one.index - other.index).map(([row, turn]) => el("tr", {}, cell(told(turn.agent)), numberCell(turn.index),
    numberCell(turn.reward), names.map((name) => numberCell(turn[name])),
    cell(told(turn.policy)), numberCell(turn.version),
    cell(told((row.messages.find((message) => row.turns[message.turn] === turn)?.content ?? "").slice(0, 120)))));
  const reports = record.whatif.map((report) => el("tr", {}, cell(told(report.agent)), numberCell(report.turn),
    ...[report.recorded, report.other].map((side) => estimateCell(side.mean, side.ci95)),
    estimateCell(report.advantage, report.ci95)));
  const tree = record.tree ? await get("tree", { run, id }) : null;
  const played = tree ? [] : unpack(await get("episodes", { run, first: record.iteration, last: record.iteration })).filter((episode) => episode.id.startsWith(`${id}/`)).reverse();
  return [
    el("h1", {}, "Credit of ", link(id, "episode", { run, id })),
    el("p", {}, formula(turns)),
    table(["agent", "turn", "reward", ...names, "policy", "version", "message"], lines),
    reports.length ? [el("h2", {}, "Counterfactual values"), el("p", { class: "note" }, "Mean returns of continuations, with 95 % intervals."),
      table(["agent", "turn", "recorded decision", "other decisions", "advantage"], reports)] : null,
    played.length ? [el("h2", {}, "Other continuations"), el("p", { class: "note" }, "Episodes with another decision, or without an agent, which the credit compares with this one."),
      table(["episode", "reward"], played.map((episode) => el("tr", {}, cell(link(episode.id, "episode", { run, id: episode.id })), numberCell(episode.reward))))] : null,
    whatifCommands(record, id),
    tree ? [el("h2", {}, "Branches of the turn tree"), el("p", { class: "note" }, `${new Set(tree.actions.map((action) => action.path)).size} paths; bold: this episode.`), branches(tree, run, id)] : null,
  ];
}
