// The table of clients: only the rows in view exist, so 10,000 clients scroll freely.

const ROW = 34;
const AROUND = 8;

// columns: [{key, words, text(at), value(at), wide}]; pick(at) when a row is chosen.
class ClientTable {
  constructor(count, columns, options) {
    this.count = count;
    this.columns = columns;
    this.options = options;
    this.sort = options.sort || { key: null, down: false };
    this.rows = [];
    this.active = 0;
    this.build();
    this.filter(() => true);
  }

  build() {
    this.heads = new Map();
    const heads = this.columns.map((column, place) => {
      const button = el("button", { type: "button", on: { click: () => this.sortBy(column.key) } }, column.words);
      const head = el("th", { scope: "col", role: "columnheader", "aria-sort": "none", "aria-colindex": place + 1,
        class: this.shape(column) }, button);
      this.heads.set(column.key, head);
      return head;
    });
    this.body = el("tbody", { role: "rowgroup" });
    this.grid = el("table", { class: "grid", role: "grid", "aria-label": "Clients", "aria-colcount": this.columns.length },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row", "aria-rowindex": "1" }, heads)), this.body);
    this.node = el("div", { class: "scroll clients", tabindex: "-1", on: { scroll: () => this.render() } }, this.grid);
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-at]");
      if (row) this.choose(Number(row.dataset.at));
    });
    this.body.addEventListener("keydown", (event) => this.key(event));
  }

  shape(column) {
    return [column.number === false ? "" : "number", column.wide ? "wide" : ""].join(" ").trim() || null;
  }

  filter(keep) {
    this.rows = [];
    for (let at = 0; at < this.count; at += 1) if (keep(at)) this.rows.push(at);
    this.order();
  }

  sortBy(key) {
    const column = this.columns.find((one) => one.key === key);
    const down = this.sort.key === key ? !this.sort.down : column.number !== false && !column.smallFirst;
    this.sort = { key, down };
    this.order();
    this.options.announce(`Sorted by ${column.words}, ${down ? "largest" : "smallest"} first`);
  }

  order() {
    const { key, down } = this.sort;
    const column = this.columns.find((one) => one.key === key);
    if (column) {
      const values = column.value;
      const way = down ? -1 : 1;
      this.rows.sort((a, b) => {
        const [one, other] = [values(a), values(b)];
        if (one === null || other === null) return (one === null) - (other === null) || a - b;
        if (one === other) return a - b;
        return way * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
      });
    } else this.rows.sort((a, b) => a - b);
    for (const [name, head] of this.heads) {
      head.setAttribute("aria-sort", name !== key ? "none" : down ? "descending" : "ascending");
    }
    this.grid.setAttribute("aria-rowcount", this.rows.length + 1);
    this.active = 0;
    this.node.scrollTop = 0;
    this.render(true);
  }

  window() {
    const high = this.all ? ROW * this.all : this.node.clientHeight || 480;
    const first = Math.max(0, Math.floor(this.node.scrollTop / ROW) - AROUND);
    return [first, Math.min(this.rows.length, first + Math.ceil(high / ROW) + 2 * AROUND)];
  }

  render(anew = false) {
    const [first, last] = this.window();
    if (!anew && first === this.first && last === this.last) return;
    [this.first, this.last] = [first, last];
    const focused = this.body.contains(document.activeElement);
    const rows = [this.space(first)];
    for (let place = first; place < last; place += 1) rows.push(this.row(place));
    rows.push(this.space(this.rows.length - last));
    if (!this.rows.length) rows.push(el("tr", { role: "row" }, el("td", { class: "empty", colspan: this.columns.length, role: "gridcell" }, "No client matches.")));
    this.body.replaceChildren(...rows.filter(Boolean));
    if (focused) this.focus();
  }

  space(rows) {
    if (!rows || this.all) return null;
    const cell = el("td", { colspan: this.columns.length });
    cell.style.height = `${rows * ROW}px`;
    return el("tr", { class: "space", "aria-hidden": "true" }, cell);
  }

  row(place) {
    const at = this.rows[place];
    const tab = place === Math.min(Math.max(this.active, this.first), this.last - 1) ? "0" : "-1";
    return el("tr", { role: "row", "data-at": at, "aria-rowindex": place + 2, tabindex: tab,
      "aria-selected": String(this.options.selected() === at) },
      this.columns.map((column, number) => el(number ? "td" : "th", { class: this.shape(column), role: number ? "gridcell" : "rowheader", "aria-colindex": number + 1 },
        column.node ? column.node(at) : column.text(at))));
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.rows.length, End: this.rows.length };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      const row = event.target.closest("tr[data-at]");
      if (row) this.choose(Number(row.dataset.at), true);
    } else if (event.key in moves) {
      event.preventDefault();
      const row = event.target.closest("tr[data-at]");
      const from = row ? Number(row.getAttribute("aria-rowindex")) - 2 : this.active;
      this.active = Math.min(Math.max(from + moves[event.key], 0), this.rows.length - 1);
      this.focus();
    }
  }

  focus() {
    const head = this.grid.tHead.offsetHeight;
    const top = this.active * ROW;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    const room = this.node.clientHeight - head - ROW;
    if (top > this.node.scrollTop + room) this.node.scrollTop = top - room;
    const [first, last] = this.window();
    if (first !== this.first || last !== this.last) this.render();
    const row = this.body.querySelector(`tr[aria-rowindex="${this.active + 2}"]`);
    if (!row) return;
    this.body.querySelectorAll('tr[tabindex="0"]').forEach((other) => other.setAttribute("tabindex", "-1"));
    row.setAttribute("tabindex", "0");
    row.focus({ preventScroll: true });
  }

  choose(at, byKey = false) {
    this.active = this.rows.indexOf(at);
    this.options.pick(at, byKey);
    this.render(true);
  }

  // On paper there is no scrolling: the first rows, all at once.
  print(rows) {
    this.all = rows;
    if (rows) this.node.scrollTop = 0;
    this.render(true);
  }
}
