// An episode: a lane for each agent, a column for each step; long observations folded, tool calls beside their results.
import { whatifCommands } from "./credit.js";
import { cell, command, counted, el, get, link, longText, number, numberCell, table, told } from "./dom.js";

// Return the cells of a trajectory: what the agent saw, its message, the results of its calls.
export function cells(row) {
  const found = [];
  let before = [];
  for (const message of row.messages) {
    const last = found.at(-1);
    if (message.turn !== undefined) {
      found.push({ turn: row.turns[message.turn], message, before, results: [] });
      before = [];
    } else if (message.role === "tool" && last && !before.length) {
      last.results.push(message);
    } else {
      before.push(message);
    }
  }
  return { found, after: before };
}

const FOLDED = 200, LINES = 10;

function seen(messages, text, open = false) {
  if (!messages.length) return null;
  const length = messages.reduce((sum, message) => sum + message.content.length, 0);
  const breaks = messages.reduce((sum, message) => sum + message.content.split("\n").length, 0);
  return el("details", { open: open || (length < FOLDED && breaks < LINES) }, el("summary", {}, text, ` (${counted(length, "character")})`),
    messages.map((message) => el("div", { class: `message ${message.role}` }, el("b", {}, message.role), longText(message.content))));
}

const result = (message) => seen([message], "result");

function calls(cell) {
  return (cell.message.tool_calls ?? []).map((call) => {
    const answer = cell.results.find((message) => message.tool_call_id === call.id);
    return el("div", { class: "call" }, el("b", {}, "call "), told(call.name), longText(JSON.stringify(call.arguments)),
      answer ? result(answer) : el("p", {}, "no result"));
  });
}

const signed = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "");

export function facts(turn) {
  const parts = Object.entries(turn.components).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const credit = ["return", "baseline", "advantage"].filter((name) => typeof turn[name] === "number");
  return el("p", { class: "facts" },
    el("span", {}, `reward ${number(turn.reward)}`),
    parts ? el("span", {}, "(", told(parts), ")") : null,
    credit.map((name) => el("span", { class: name === "advantage" ? signed(turn[name]) : "" }, `${name} ${number(turn[name])}`)),
    el("span", {}, counted(turn.stop - turn.start, "token")), el("span", {}, `version ${turn.version}`),
    el("span", { class: turn.finish_reason === "length" ? "bad" : "" }, told(turn.finish_reason)));
}

function card(cell) {
  const paired = new Set((cell.message.tool_calls ?? []).map((call) => call.id));
  return el("div", { class: "card" }, seen(cell.before, "observation"),
    el("div", { class: "message assistant" }, longText(cell.message.content)), calls(cell),
    cell.results.filter((message) => !paired.has(message.tool_call_id)).map(result),
    facts(cell.turn));
}

export function lanes(record) {
  const rows = Object.values(record.trajectories).flat();
  const steps = [...new Set(rows.flatMap((row) => row.turns.map((turn) => turn.index)))].sort((one, other) => one - other);
  const grid = el("div", { class: "lanes" }), alone = rows.length === 1;  // a single agent's steps are read from top to bottom
  grid.style.gridTemplateColumns = alone ? "max-content minmax(0, 60rem)" : `minmax(6rem, max-content) repeat(${steps.length + 1}, minmax(15rem, 24rem))`;
  const put = (element, line, column) => {
    element.style.gridRow = alone ? column : line;
    element.style.gridColumn = alone ? line : column;
    grid.append(element);
  };
  steps.forEach((step, column) => put(el("div", { class: "step" }, `step ${step}`), 1, column + 2));
  rows.forEach((row, line) => {
    const again = line > 0 && rows[line - 1].agent === row.agent;
    put(el("div", { class: "agent" }, told(row.agent), el("small", {}, "policy ", told(row.policy)),
      again ? el("small", { class: "warning" }, "the chat template rewrote history: a new trajectory") : null), line + 2, 1);
    const { found, after } = cells(row);
    for (const cell of found) put(card(cell), line + 2, steps.indexOf(cell.turn.index) + 2);
    const rest = row.turns.length ? seen(after, "after the last turn") : seen(after, "conversation", true);
    if (rest) put(rest, line + 2, steps.length + 2);
  });
  return grid;
}

export function title(record) {
  const { task } = record;
  return [
    el("p", {}, "task ", told(`${task.environment}/${task.split}/${task.index}`), `, seed ${record.seed}${record.iteration < 0 ? "" : `, iteration ${record.iteration}`}, group `, told(record.group)),
    el("p", {}, record.error ? "" : `reward ${number(record.reward)}, `, "ended: ", told(record.stop_reason), record.truncated ? ", truncated" : "",
      typeof record.success !== "boolean" ? "" : [", ", el("span", { class: record.success ? "good" : "bad" }, record.success ? "solved" : "not solved")],
      record.attempts > 1 ? `, started ${record.attempts} times` : "", record.excluded ? [", not trained on: ", told(record.excluded)] : ""),
    record.error ? el("p", { class: "warning" }, "error: ", told(record.error)) : null,
  ];
}

export async function episodeView({ run, id }) {
  const record = await get("episode", { run, id });
  const numbers = Object.entries(record.metrics ?? {}).map(([name, value]) => el("tr", {}, cell(told(name)), numberCell(value)));
  return [
    el("h1", {}, "Episode ", told(id), " of ", link(run, "run", { run })),
    title(record),
    el("p", {}, link("Tokens", "tokens", { run, id }), " · ", link(record.tree ? "Credit and branches" : "Credit", "credit", { run, id }), " · ",
      link("Its group side by side", "group", { run, group: record.group, iteration: record.iteration })),
    lanes(record),
    el("details", {}, el("summary", {}, "the task's data"), el("pre", {}, told(JSON.stringify(record.task.data, null, 1)))),
    numbers.length ? el("details", {}, el("summary", {}, "metrics of the environment"), table(["metric", "value"], numbers)) : null,
    command(["mrlm", "view", record.named, "--text", "--episode", id]),
    command(["mrlm", "replay", record.played, "--episode", id]),
    whatifCommands(record, id),
  ];
}
