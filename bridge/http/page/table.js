
/* A table of many rows: filter, order, and `most` of them at first. It keeps its rows, so that focus and selection
   survive an update. A row is {key, cells, values}: `values` are what columns are sorted by; the order given is the
   usual one. A cell is a text or {text, sub, pill, state, meter, label, calm, href, buttons}. */
class Table {
  constructor(id, columns, { filter = true, most = 50, usual = "trouble first", onfind = null, onsort = null } = {}) {
    this.section = $(id);
    this.columns = columns;
    this.most = most;
    this.onfind = onfind;
    this.onsort = onsort;
    this.rows = new Map();
    this.items = [];
    this.order = { at: null, down: false };
    const title = this.section.querySelector("h2");
    const table = make("table"), head = make("thead"), line = make("tr");
    this.body = make("tbody");
    this.table = table;
    table.setAttribute("aria-labelledby", title.id);
    this.tools = make("p", undefined, "tools");
    this.select = make("select");
    this.select.append(new Option(usual, ""));
    columns.forEach(([label, kind], at) => {
      const cell = make("th", undefined, kind);
      cell.scope = "col";
      if (label && (kind || "").includes("fixed")) cell.textContent = label;
      else if (label) {
        const button = make("button", label, "sort");
        button.type = "button";
        button.addEventListener("click", () => this.sort(at));
        cell.append(button);
        this.select.append(new Option(label, at));
      } else cell.append(make("span", "Actions", "unseen"));
      line.append(cell);
    });
    head.append(line);
    table.append(head, this.body);
    for (const [node, role] of [[table, "table"], [head, "rowgroup"], [this.body, "rowgroup"], [line, "row"]]) node.setAttribute("role", role);
    for (const cell of line.children) cell.setAttribute("role", "columnheader");
    if (filter) {
      const label = make("label", "Find ");
      this.input = make("input");
      Object.assign(this.input, { type: "search", autocomplete: "off", spellcheck: false });
      this.input.addEventListener("input", () => { if (this.onfind) this.onfind(); this.paint(); });
      label.append(this.input);
      const order = make("label", "Order ", "narrow");
      this.select.addEventListener("change", () => this.sort(this.select.value === "" ? null : Number(this.select.value), true));
      order.append(this.select);
      this.count = make("span", "", "hint");
      this.count.setAttribute("role", "status");
      this.tools.append(label, order, this.count);
      title.after(this.tools);
    }
    this.more = make("button", "Show all", "more");
    this.more.type = "button";
    this.more.hidden = true;
    this.more.addEventListener("click", () => { this.most += 200; this.paint(); });
    const empty = this.section.querySelector(".empty");
    empty.before(table);
    empty.after(this.more);
    this.empty = empty;
  }

  get find() { return this.input ? this.input.value.trim().toLowerCase() : ""; }

  sort(at, chosen = false) {
    const kind = at === null ? "" : this.columns[at][1] || "";
    const first = /\bn\b|wide/.test(kind);
    if (at === null || (!chosen && this.order.at === at && this.order.down !== first)) this.order = { at: null, down: false };
    else this.order = { at, down: !chosen && this.order.at === at ? !this.order.down : first };
    this.select.value = this.order.at === null ? "" : String(this.order.at);
    [...this.table.tHead.rows[0].cells].forEach((cell, place) => {
      if (place === this.order.at) cell.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    if (this.onsort) this.onsort();
    this.paint();
  }

  show(items, total = items.length) {
    this.items = items;
    this.total = total;
    this.paint();
  }

  paint() {
    let items = this.items;
    const find = this.onfind ? "" : this.find;
    if (find) items = items.filter(({ key, cells }) => `${key}\n${cells.map((c) => typeof c === "string" ? c : `${c.text || ""} ${c.state || ""} ${c.sub || ""}`).join("\n")}`.toLowerCase().includes(find));
    const { at, down } = this.order;
    if (at !== null && !this.onsort) {
      const order = (a, b) => typeof a === "string" ? a.localeCompare(b) : (a ?? -1) - (b ?? -1);
      items = [...items].sort((a, b) => (down ? -1 : 1) * order(a.values[at], b.values[at]));
    }
    const shown = items.slice(0, this.most), kept = new Set();
    shown.forEach(({ key, cells }, place) => {
      kept.add(key);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, row = this.fresh());
      cells.forEach((cell, n) => this.fill(row.children[n], cell));
      if (this.body.children[place] !== row) {
        const focused = row.contains(document.activeElement) ? document.activeElement : null;
        this.body.insertBefore(row, this.body.children[place] || null);
        if (focused) focused.focus();
      }
    });
    for (const [key, row] of this.rows) if (!kept.has(key)) { row.remove(); this.rows.delete(key); }
    this.table.hidden = !items.length;
    this.empty.hidden = this.items.length > 0 || Boolean(this.find);
    this.more.hidden = items.length <= this.most;
    put(this.more, `Show ${whole.format(Math.min(200, items.length - this.most))} more`);
    if (this.count) {
      this.tools.hidden = !this.find && this.items.length < 2;
      put(this.count, this.find ? many(items.length, "match").replace("matchs", "matches")
        : this.total > shown.length ? `${whole.format(shown.length)} of ${whole.format(this.total)}` : "");
    }
  }

  fresh() {
    const row = make("tr");
    row.setAttribute("role", "row");
    for (const [label, kind] of this.columns) {
      const cell = make("td", undefined, kind);
      cell.setAttribute("role", "cell");
      cell.dataset.label = label;
      cell.append(make("span", "", "value"));
      row.append(cell);
    }
    return row;
  }

  fill(cell, content) {
    const { text, sub, pill, state, meter, label, calm, href, buttons } = typeof content === "string" ? { text: content } : content;
    const value = cell.firstChild;
    const wanted = JSON.stringify([text, sub, pill, state, meter, label, calm, href, (buttons || []).map(({ name, text }) => [name, text])]);
    if (cell.shown === wanted) return;
    cell.shown = wanted;
    cell.classList.toggle("pills", pill !== undefined);
    if (pill) value.replaceChildren(make("span", state, `pill ${pill}`));
    else if (href) {
      const anchor = make("a", text);
      anchor.href = href;
      value.replaceChildren(anchor);
    } else value.replaceChildren(document.createTextNode(text || ""));
    if (meter !== undefined) {
      const bar = make("meter");
      Object.assign(bar, { min: 0, max: 1, value: meter }, calm ? {} : { low: 0.8, high: 0.95, optimum: 0 });
      bar.setAttribute("aria-label", label);
      value.append(bar);
    }
    for (const { name, text: caption, press } of buttons || []) {
      const button = make("button", caption);
      button.type = "button";
      button.setAttribute("aria-label", name);
      button.addEventListener("click", press);
      value.append(button);
    }
    if (sub) value.append(make("span", sub, "sub"));
  }
}
