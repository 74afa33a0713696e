// A table that draws only the rows in sight, so that ten thousand of them scroll like ten.

import { el, show } from "./dom.js";

const NARROW = matchMedia("(max-width: 700px)");
const EXTRA = 8; // rows above and below those in sight

export class VirtualTable {
  /**
   * `columns`: `{ label, cell(row), sort(row) }`; `layout`: the CSS class with the widths of the columns; `heights`: of
   * a row on wide and narrow screens.
   */
  constructor({ label, columns, layout, heights = [40, 68], atEnd = () => {}, empty = "Nothing here." }) {
    Object.assign(this, { columns, layout, heights, atEnd, empty });
    this.rows = [];
    this.order = null; // { column, down }
    this.head = el("div", { role: "row", class: `vt-row ${layout}` });
    this.space = el("div", { role: "presentation", class: "vt-space" });
    this.body = el("div", { role: "rowgroup", class: "vt-body", tabindex: 0, "aria-label": `Rows: ${label}`, onscroll: () => this._draw() }, this.space);
    this.node = el("div", { class: "vt", role: "table", "aria-label": label }, el("div", { role: "rowgroup", class: "vt-head" }, this.head), this.body);
    this._resize = new ResizeObserver(() => this._draw(true));
    this._resize.observe(this.body);
    this._drawHead();
  }

  close() {
    this._resize.disconnect();
  }

  _drawHead() {
    const cells = this.columns.map((column) => {
      const sorted = this.order?.column === column ? (this.order.down ? "descending" : "ascending") : null;
      const sortable = column.sort ? el("button", { class: "sort", type: "button", onclick: () => this._sortBy(column) }, column.label) : column.label;
      return el("span", { role: "columnheader", "aria-sort": sorted }, sortable);
    });
    show(this.head, cells);
  }

  _sortBy(column) {
    const down = this.order?.column === column && !this.order.down;
    this.order = { column, down };
    this._drawHead();
    this.set(this.rows);
  }

  /** Show these rows. */
  set(rows) {
    this.rows = rows;
    if (this.order) {
      const { column, down } = this.order;
      const key = (row) => column.sort(row) ?? "";
      this.rows = [...rows].sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? -1 : 1));
    }
    this.node.setAttribute("aria-rowcount", this.rows.length + 1);
    this._draw(true);
  }

  _draw(always = false) {
    const height = NARROW.matches ? this.heights[1] : this.heights[0];
    const first = Math.max(0, Math.floor(this.body.scrollTop / height) - EXTRA);
    const last = Math.min(this.rows.length, Math.ceil((this.body.scrollTop + this.body.clientHeight) / height) + EXTRA);
    if (!always && first === this._first && last === this._last) return;
    [this._first, this._last] = [first, last];
    this.space.style.height = `${Math.max(1, this.rows.length) * height}px`;
    const focused = this.space.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const shown = [];
    for (let index = first; index < last; index++) {
      const row = el("div", { role: "row", class: `vt-row ${this.layout}`, "aria-rowindex": index + 2 },
        this.columns.map((column) => el("span", { role: "cell", "data-label": column.label }, column.cell(this.rows[index]))));
      row.style.transform = `translateY(${index * height}px)`;
      row.style.height = `${height}px`;
      shown.push(row);
    }
    if (!this.rows.length) shown.push(el("div", { role: "row", class: "vt-empty" }, el("span", { role: "cell" }, this.empty)));
    show(this.space, shown);
    if (focused) [...this.space.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus({ preventScroll: true });
    if (last === this.rows.length) this.atEnd();
  }
}
