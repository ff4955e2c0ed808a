"use strict";
// One page of rows is in the document at a time, however many gateways there are.
const ROWS = 100;
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const count = (n) => Number(n).toLocaleString("en");

function make(tag, text, name) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (name) found.className = name;
  return found;
}

function age(ms) {
  if (ms === null) return "–";
  const seconds = Math.max(0, (data.made - ms) / 1000);
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= 2 * length) return `${count(Math.round(seconds / length))} ${unit}`;
  return `${Math.round(seconds)} s`;
}

const time = (ms) => (ms === null ? "–" : new Date(ms).toISOString().replace("T", " ").slice(0, 19));

// A gateway's figures are the sums of its streams'; its newest row is the newest of any of them.
const STREAM = ["stream", "epoch", "first", "last", "rows", "newest", "missing", "quarantined", "unreadable", "waiting",
  "trimmed", "duplicates", "late", "ranges", "more"];
const SUMS = ["rows", "missing", "quarantined", "unreadable", "waiting", "trimmed"];
const gateways = data.gateways.map(([name, version, reported, streams]) => {
  const gateway = { name, version, reported, newest: null, lower: name.toLowerCase() };
  gateway.streams = streams.map((values) => Object.fromEntries(STREAM.map((key, n) => [key, values[n]])));
  for (const key of SUMS) gateway[key] = gateway.streams.reduce((sum, stream) => sum + Number(stream[key]), 0);
  for (const { newest } of gateway.streams) if (newest !== null && newest > gateway.newest) gateway.newest = newest;
  gateway.bad = gateway.missing + gateway.quarantined + gateway.unreadable;
  return gateway;
});

const figure = (key) => ({ text: (one) => count(one[key]), bad: (one) => key !== "waiting" && key !== "trimmed" && key !== "rows" && one[key] > 0 });
const late = (ms) => (ms === null ? Infinity : -ms); // no row at all is latest
const COLUMNS = [
  { head: "gateway", text: (one) => one.name, value: (one) => one.lower },
  { head: "newest row", text: (one) => age(one.newest), value: (one) => late(one.newest), down: true },
  ...["missing", "quarantined", "unreadable", "waiting", "trimmed", "rows"].map((key) => (
    { head: key, ...figure(key), value: (one) => one[key], down: true })),
  { head: "report", text: (one) => age(one.reported), value: (one) => late(one.reported), down: true },
  { head: "version", text: (one) => one.version || "–", value: (one) => one.version },
  { head: "streams", text: (one) => count(one.streams.length), value: (one) => one.streams.length, down: true },
];
const view = { column: COLUMNS[1], down: true, page: 0, rows: [] };

function choose() {
  const words = at("find").value.toLowerCase(), show = at("show").value, version = at("version").value;
  const shows = {
    all: () => true, bad: (one) => one.bad > 0, waiting: (one) => one.waiting > 0, silent: (one) => one.reported === null,
  }[show];
  view.rows = gateways.filter((one) => one.lower.includes(words) && shows(one) && (!version || one.version === version));
  const keys = new Map(view.rows.map((one) => [one, view.column.value(one)]));
  const sign = view.down ? -1 : 1;
  view.rows.sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    return x < y ? -sign : x > y ? sign : a.lower < b.lower ? -1 : 1;
  });
  view.page = 0;
  draw();
}

function draw() {
  const pages = Math.max(1, Math.ceil(view.rows.length / ROWS));
  at("gateways").replaceChildren(...view.rows.slice(view.page * ROWS, (view.page + 1) * ROWS).map((one) => {
    const row = make("tr");
    COLUMNS.forEach((column, n) => {
      const cell = make("td", n ? column.text(one) : undefined, column.bad && column.bad(one) ? "bad" : "");
      if (!n) {
        const open = make("button", one.name);
        open.type = "button";
        open.addEventListener("click", () => { location.hash = encodeURIComponent(one.name); });
        cell.append(open);
      }
      row.append(cell);
    });
    return row;
  }));
  [...at("heads").children].forEach((head, n) => {
    head.setAttribute("aria-sort", COLUMNS[n] !== view.column ? "none" : view.down ? "descending" : "ascending");
  });
  at("page").textContent = `${count(view.rows.length)} gateways, page ${view.page + 1} of ${pages}`;
  at("back").disabled = view.page === 0;
  at("next").disabled = view.page + 1 >= pages;
  at("none").hidden = view.rows.length > 0;
}

function detail() {
  let name = "";
  try { name = decodeURIComponent(location.hash.slice(1)); } catch { /* somebody has edited the address */ }
  const one = gateways.find((gateway) => gateway.name === name);
  at("detail").hidden = !one;
  if (!one) return;
  at("name").textContent = one.name;
  at("facts").textContent = `version ${one.version || "unknown"}; ` +
    (one.reported === null ? "no report: a lost tail would go unnoticed" : `last report ${time(one.reported)} UTC`);
  at("streams").replaceChildren(...one.streams.map((stream) => {
    const row = make("tr");
    const numbers = stream.first === null ? "–" : `${stream.first}..${stream.last}`;
    for (const text of [stream.stream, stream.epoch, numbers, count(stream.rows), age(stream.newest)])
      row.append(make("td", text));
    for (const key of ["missing", "quarantined", "unreadable", "waiting", "trimmed", "duplicates", "late"])
      row.append(make("td", count(stream[key]), figure(key).bad(stream) && SUMS.includes(key) ? "bad" : ""));
    return row;
  }));
  const ranges = one.streams.flatMap((stream) => {
    const rows = stream.ranges.map(([first, last, many, kind, reason, after, before]) => {
      const row = make("tr");
      for (const text of [stream.stream, stream.epoch, `${first}..${last}`, count(many), time(after), time(before)])
        row.append(make("td", text));
      row.append(make("td", data.kinds[kind] + (reason ? ` (${reason})` : ""), "text"));
      return row;
    });
    if (stream.more) {
      const cell = make("td", `${stream.stream}: ${count(stream.more)} more ranges; report --json lists them`, "text");
      cell.colSpan = 7;
      const row = make("tr");
      row.append(cell);
      rows.push(row);
    }
    return rows;
  });
  at("ranges").replaceChildren(...ranges);
  at("whole").hidden = ranges.length > 0;
  at("detail").scrollIntoView();
  at("detail").focus({ preventScroll: true });
}

function heads(id, names) {
  at(id).append(...names.map((name) => {
    const head = make("th", name);
    head.scope = "col";
    return head;
  }));
}

function tile(name, value, more, bad) {
  const box = make("div");
  if (bad) box.dataset.level = "bad";
  box.append(make("dt", name), make("dd", value));
  if (more) box.append(make("dd", more));
  at("tiles").append(box);
}

const total = (key) => gateways.reduce((sum, one) => sum + one[key], 0);
const having = (...keys) => `at ${count(gateways.filter((one) => keys.some((key) => one[key] > 0)).length)} gateways`;
const unread = total("quarantined") + total("unreadable");
document.title = `Fleet of ${data.table}`;
at("table").textContent = data.table;
at("about").textContent = `As of ${time(data.made)} UTC; all objects listed at ${time(data.full)} UTC; ` +
  (data.files === null ? "files of the table never compared" : `all files of the table compared since ${time(data.files)} UTC`);
at("state").textContent = data.complete ? "Complete" : "Not complete";
at("state").dataset.level = data.complete ? "good" : "bad";
at("notices").append(...data.problems.map((problem) => make("li", problem)));
const versions = new Map();
for (const { version } of gateways) versions.set(version, (versions.get(version) || 0) + 1);
const common = [...versions].sort((a, b) => b[1] - a[1]);
tile("Gateways", count(gateways.length), `${count(gateways.filter((one) => one.reported === null).length)} without a report`, !gateways.length);
tile("Table", ...data.state);
tile("Newest row", age(gateways.reduce((newest, one) => Math.max(newest, one.newest || 0), 0) || null), `${count(total("rows"))} rows`);
tile("Missing", count(total("missing")), having("missing"), total("missing") > 0);
tile("Quarantined or unreadable", count(unread), having("quarantined", "unreadable"), unread > 0);
tile("Waiting", count(total("waiting")), having("waiting"));
tile("Versions", count(versions.size), common.slice(0, 4).map(([name, many]) => `${name || "unknown"}: ${count(many)}`).join(", "));
at("version").append(...common.filter(([name]) => name).map(([name]) => make("option", name)));
at("heads").append(...COLUMNS.map((column) => {
  const head = make("th"), sort = make("button", column.head);
  head.scope = "col";
  sort.type = "button";
  sort.addEventListener("click", () => {
    view.down = view.column === column ? !view.down : Boolean(column.down);
    view.column = column;
    choose();
  });
  head.append(sort);
  return head;
}));
heads("stream-heads", ["stream", "epoch", "numbers", "rows", "newest row", "missing", "quarantined", "unreadable",
  "waiting", "trimmed", "duplicates", "late"]);
heads("range-heads", ["stream", "epoch", "numbers", "count", "after", "before", "what"]);
for (const id of ["find", "show", "version"]) at(id).addEventListener("input", choose);
at("back").addEventListener("click", () => { view.page -= 1; draw(); });
at("next").addEventListener("click", () => { view.page += 1; draw(); });
at("close").addEventListener("click", () => { location.hash = ""; });
addEventListener("hashchange", detail);
choose();
detail();
