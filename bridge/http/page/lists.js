
/* Connected clients, in pages that the gateway filters and sorts. */
const ORDERS = ["id", "", "since", "rate", "subscriptions", "queued"];
const clients = new Table("clients", [["Client id"], ["User and address", "fixed"], ["Connected", "n"], ["Rate", "n"], ["Subscriptions", "n"], ["Queue", "n"]],
  { most: 100, usual: "slowed, then longest queue first", onfind: () => { clientsFrom = 0; wake(); }, onsort: () => { clientsFrom = 0; wake(); } });
const unmatched = new Table("unmatched", [["Topics", "fixed"], ["Client", "fixed"], ["Messages", "n fixed"], ["Write into a stream", "fixed"]], { filter: false, most: 256 });
let clientsFrom = 0;

async function showClients(now) {
  const { at } = clients.order;
  const ask = () => get("/clients.json", { find: clients.find, sort: at === null ? "queued" : ORDERS[at], offset: clientsFrom });
  let found = await ask();
  if (found.offset && found.offset >= found.found) {  // they have gone: show the last page
    clientsFrom = Math.max(0, Math.floor((found.found - 1) / 100) * 100);
    found = await ask();
  }
  clients.tools.hidden = false;
  clients.show(found.clients.map((c) => ({
    key: JSON.stringify([c.listener, c.id, c.since]), values: [], cells: [
      { text: c.id || "(empty)", sub: c.protocol },
      { text: c.user === null ? "anonymous" : c.user, sub: c.address },
      { text: span(now.time - c.since) },
      { text: `${rate(c.rate)}/s`, sub: `${whole.format(c.published)} in total${c.slowed ? ", slowed: over a budget" : ""}` },
      { text: whole.format(c.subscriptions), sub: c.filters.join(", ") + (c.subscriptions > c.filters.length ? ", …" : "") },
      whole.format(c.queued),
    ] })), found.clients.length);
  clients.tools.hidden = false;
  const last = found.offset + found.clients.length;
  $("unmatched").hidden = !found.unmatched.length;
  unmatched.show(found.unmatched.map((u) => ({ key: u.topics, values: [], cells: [
    { text: u.topics, sub: u.topics === u.topic ? "" : u.topic },
    { text: u.client, sub: `${span(now.time - u.last)} ago` },
    { text: whole.format(u.messages), sub: u.delivered ? "subscribers get them" : "stored nowhere" },
    u.line,
  ] })), found.unmatched.length);
  put($("clients-text"), found.found ? `${whole.format(found.offset + 1)} to ${whole.format(last)} of ${whole.format(found.found)}` : "");
  put(clients.count, clients.find ? `${whole.format(found.found)} of ${whole.format(found.connected)}` : "");
  $("clients-back").disabled = !found.offset;
  $("clients-next").disabled = last >= found.found;
}

for (const [id, step] of [["clients-back", -100], ["clients-next", 100]])
  $(id).addEventListener("click", () => { clientsFrom = Math.max(0, clientsFrom + step); wake(); });

/* Recent events: lines of the log, and what has failed or recovered. */
const KEPT_EVENTS = 500;
const HIDDEN = ["time", "level", "logger", "msg", "repeated", "alike"];
const events = { newest: 0, all: [], started: null };

async function learnEvents(now) {
  if (now.started !== events.started) Object.assign(events, { newest: 0, all: [], started: now.started });  // numbers begin again
  const found = await get("/events.json", { after: events.newest || null });
  if (found.newest < events.newest) { Object.assign(events, { newest: 0, all: [] }); return; }
  events.newest = found.newest;
  const again = new Set(found.events.map(({ first }) => first));
  events.all = [...found.events.reverse(), ...events.all.filter(({ first }) => !again.has(first))].slice(0, KEPT_EVENTS);
}

function eventItem({ line, times }) {
  const item = make("li"), level = { warning: "warn", error: "bad", critical: "bad" }[line.level] || "plain";
  const rest = Object.entries(line).filter(([key]) => !HIDDEN.includes(key)).map(([key, value]) => `${key}=${typeof value === "string" ? value : JSON.stringify(value)}`);
  const time = make("time", moment.format(Date.parse(line.time)));
  item.append(time, make("span", line.level, `pill ${level}`), make("span", line.msg, "text"));
  if (times > 1) rest.unshift(`${whole.format(times)} times, the last one shown`);
  if (rest.length) item.append(make("span", rest.join("  "), "sub"));
  return item;
}

function showEvents(list, empty, wanted) {
  const found = events.all.filter(({ line }) => wanted(line)).slice(0, 200), shown = found.map(({ number }) => number).join();
  if (list.shown !== shown) {
    list.shown = shown;
    list.replaceChildren(...found.map(eventItem));
  }
  empty.hidden = found.length > 0;
}

function showAllEvents() {
  const find = $("events-find").value.trim().toLowerCase(), trouble = $("events-trouble").checked;
  showEvents($("events-list"), $("events-empty"), (line) => (!trouble || !["info", "debug"].includes(line.level)) && (!find || Object.values(line).join("\n").toLowerCase().includes(find)));
}

$("events-find").addEventListener("input", showAllEvents);
$("events-trouble").addEventListener("change", showAllEvents);
