const FAR = 4;  // a capacity that many times what is used would leave a chart empty

function memoryColour(kind) {
  const place = MEMORY.indexOf(kind);
  return palette()[place < 0 ? 8 : place];
}

class Peaks {
  constructor(data, choose) {
    this.data = data;
    this.canvas = document.getElementById("peaks-canvas");
    this.kinds = MEMORY.filter((kind) => data.ranks.some((rank) => rank.peak[kind]));
    this.canvas.addEventListener("pointermove", (event) => showTip(event, this.describe(event)));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("click", (event) => {
      const place = this.place(event.offsetX);
      if (place >= 0) choose(place);
    });
  }
  parts(rank) {
    const live = Object.values(rank.peak).reduce((a, b) => a + b, 0);
    return [...this.kinds.map((kind) => [kind, rank.peak[kind] || 0]),
      ["allocator", Math.max(0, rank.reserved - live)], ["context", rank.context]];
  }
  colour(kind) {
    return kind === "allocator" ? css("--c8") : kind === "context" ? css("--line")
      : memoryColour(kind);
  }
  place(x) {
    const each = (this.canvas.clientWidth - 12 - 64) / this.data.ranks.length;
    const found = Math.floor((x - 64) / each);
    return found < this.data.ranks.length ? found : -1;
  }
  describe(event) {
    const place = this.place(event.offsetX), rank = this.data.ranks[place];
    if (!rank) return "";
    const parts = this.parts(rank).filter(([, size]) => size > 0)
      .map(([kind, size]) => `${kind} ${bytes(size)}`);
    const room = rank.capacity ? ` of ${bytes(rank.capacity)}` : "";
    return `pipeline rank ${place} (predicted): ${bytes(rank.device)}${room}\n${parts.join("\n")}`;
  }
  draw() {
    const { ctx, width, height } = surface(this.canvas, 230), ranks = this.data.ranks;
    const left = 64, right = width - 12, top = 18, bottom = height - 24;
    const used = Math.max(1, ...ranks.map((rank) => rank.device));
    const least = Math.min(...ranks.map((rank) => rank.capacity || Infinity));
    const most = 1.06 * (least < FAR * used ? Math.max(least, used) : used);
    yAxis(ctx, left, right, top, bottom, most, bytes);
    const each = (right - left) / ranks.length, wide = Math.min(90, each * 0.8);
    const labels = Math.ceil(26 / each);
    ranks.forEach((rank, i) => {
      const x = left + (i + 0.5) * each - wide / 2;
      let y = bottom;
      for (const [kind, size] of this.parts(rank)) {
        const high = size / most * (bottom - top);
        ctx.fillStyle = this.colour(kind);
        ctx.fillRect(x, y - high, wide, high);
        y -= high;
      }
      if (i % labels === 0) {
        ctx.fillStyle = css("--soft");
        ctx.textAlign = "center";
        ctx.fillText(String(i), x + wide / 2, bottom + 12);
      }
    });
    if (least <= most) {
      const y = bottom - least / most * (bottom - top);
      capacityLine(ctx, left, right, y, `capacity ${bytes(least)}`);
    }
    document.getElementById("peaks-status").textContent = least <= most || !isFinite(least) ? ""
      : `capacity ${bytes(least)}, far beyond this chart`;
    legend("memory-legend", [...this.kinds, "allocator", "context"].map(
      (kind) => [kind === "allocator" ? "held by the allocator" : kind, this.colour(kind)]));
  }
}

class MemoryOverTime {
  constructor(data) {
    this.data = data;
    this.rank = 0;
    this.canvas = document.getElementById("memory-canvas");
    const { kinds } = data.memory;
    this.order = [...kinds.keys()].sort(
      (a, b) => MEMORY.indexOf(kinds[a]) - MEMORY.indexOf(kinds[b]));
    this.sums = data.memory.rows.map((row) => row.reduce((a, b) => a + b, 0));
    this.canvas.addEventListener("pointermove", (event) => showTip(event, this.describe(event)));
    this.canvas.addEventListener("pointerleave", hideTip);
  }
  show(rank) {
    this.rank = rank;
    let at = 0;
    const row = this.data.memory.ranks[rank];
    this.times = row.t.map((delta) => (at += delta));
    this.which = row.r;
    this.draw();
  }
  get end() { return Math.max(1, Math.round(this.data.step_s / this.data.tick_s)); }
  draw() {
    const { ctx, width, height } = surface(this.canvas, 260);
    const left = 64, right = width - 12, top = 18, bottom = height - 26;
    const limit = this.data.ranks[this.rank].capacity || 0;
    const peak = Math.max(1, ...this.which.map((i) => this.sums[i]));
    const most = 1.06 * (limit > 0 && limit < FAR * peak ? Math.max(limit, peak) : peak);
    yAxis(ctx, left, right, top, bottom, most, bytes);
    const columns = Math.max(1, Math.round(right - left)), rows = this.data.memory.rows;
    const highest = new Int32Array(columns).fill(-1), put = (column, row) => {
      const held = highest[column];
      if (held < 0 || this.sums[row] > this.sums[held]) highest[column] = row;
    };
    this.times.forEach((time, i) => {  // the most within each column of pixels
      const next = i + 1 < this.times.length ? this.times[i + 1] : this.end;
      const a = Math.min(columns - 1, Math.floor(time / this.end * columns));
      const b = Math.min(columns - 1, Math.floor(next / this.end * columns));
      for (let column = a; column <= b; column++) put(column, this.which[i]);
    });
    const colours = this.data.memory.kinds.map(memoryColour);
    for (let column = 0; column < columns; column++) {
      if (highest[column] < 0) continue;
      let y = bottom;
      for (const kind of this.order) {
        const high = rows[highest[column]][kind] / most * (bottom - top);
        ctx.fillStyle = colours[kind];
        ctx.fillRect(left + column, y - high, 1.3, high);
        y -= high;
      }
    }
    if (limit > 0 && limit <= most) {
      const y = bottom - limit / most * (bottom - top);
      capacityLine(ctx, left, right, y, `capacity ${bytes(limit)}`);
    }
    xAxis(ctx, left, right, bottom, 0, this.data.step_s);
    const room = limit > 0 && limit > most ? `; capacity ${bytes(limit)}, beyond this chart` : "";
    document.getElementById("memory-status").textContent =
      `pipeline rank ${this.rank}: at most ${bytes(peak)} of live tensors (predicted)${room}`;
  }
  describe(event) {
    const left = 64, right = this.canvas.clientWidth - 12;
    const at = (event.offsetX - left) / (right - left) * this.end;
    let place = -1;
    while (place + 1 < this.times.length && this.times[place + 1] <= at) place++;
    if (place < 0 || event.offsetX > right) return "";
    const row = this.data.memory.rows[this.which[place]];
    const parts = this.order.filter((kind) => row[kind])
      .map((kind) => `${this.data.memory.kinds[kind]} ${bytes(row[kind])}`);
    return `${seconds(at * this.data.tick_s)} (predicted): ` +
      `${bytes(this.sums[this.which[place]])} live\n${parts.join("\n")}`;
  }
}

// Squarified treemap (Bruls, Huizing, van Wijk, 2000).
function squarify(items, x, y, width, height, put) {
  let rest = items.slice(), total = rest.reduce((sum, item) => sum + item.elements, 0);
  while (rest.length && total > 0 && width > 0 && height > 0) {
    const side = Math.min(width, height), scale = width * height / total;
    let row = [], sum = 0, worst = Infinity;
    for (const item of rest) {
      const area = (sum + item.elements) * scale, depth = area / side;
      const sides = [...row, item].map((one) => one.elements * scale / depth);
      const bad = Math.max(...sides.map((s) => Math.max(s / depth, depth / s)));
      if (bad > worst) break;
      row.push(item);
      sum += item.elements;
      worst = bad;
    }
    const depth = sum * scale / side;
    let at = 0;
    for (const item of row) {
      const length = item.elements * scale / depth;
      if (width >= height) put(item, x, y + at, depth, length);
      else put(item, x + at, y, length, depth);
      at += length;
    }
    if (width >= height) { x += depth; width -= depth; } else { y += depth; height -= depth; }
    rest = rest.slice(row.length);
    total -= sum;
  }
}

function drawMap(items) {
  const box = document.getElementById("map"), tiles = [];
  const how = [...new Set(items.map((item) => item.stored))];
  const order = [0, 1, 2, 3, 4, 6, 7, 5, 9, 8];
  const colour = (stored) => palette()[order[Math.min(how.indexOf(stored), 9)]];
  const sorted = items.filter((item) => item.elements > 0)
    .sort((a, b) => b.elements - a.elements);
  const whole = sorted.reduce((sum, item) => sum + item.elements, 0);
  squarify(sorted, 0, 0, box.clientWidth, box.clientHeight, (item, x, y, width, height) => {
    const tile = document.createElement("div");
    const share = (100 * item.elements / whole).toFixed(1) + " %";
    tile.style.cssText = `left:${x}px;top:${y}px;width:${width}px;height:${height}px`;
    tile.style.background = colour(item.stored);
    tile.style.color = ink(colour(item.stored));
    const text = `${item.name}: ${share} of all elements, ${item.stored}`;
    if (width > 46 && height > 18) tile.textContent = `${item.name} ${share}`;
    tile.addEventListener("pointermove", (event) => showTip(event, text));
    tile.addEventListener("pointerleave", hideTip);
    tiles.push(tile);
  });
  box.replaceChildren(...tiles);
  legend("map-legend", how.map((stored) => [stored, colour(stored)]));
}

class Scatter {
  constructor(data) {
    this.data = data;
    this.canvas = document.getElementById("scatter-canvas");
    this.canvas.addEventListener("pointermove", (event) => showTip(event, this.describe(event)));
    this.canvas.addEventListener("pointerleave", hideTip);
  }
  colour(point, i) {
    return i === 0 ? css("--c1") : point.fits ? css("--c0") : css("--c7");
  }
  draw() {
    const { ctx, width, height } = surface(this.canvas, 280), { points, bound_s } = this.data;
    const left = 64, right = width - 20, top = 20, bottom = height - 42;
    const times = points.map((p) => p.step_s), limit = points[0].capacity;
    if (bound_s) times.push(bound_s);
    let low = Math.min(...times), high = Math.max(...times);
    const pad = (high - low || high || 1) * 0.08;
    low = Math.max(0, low - pad);
    high += pad;
    const used = Math.max(1, ...points.map((p) => p.bytes));
    const most = 1.1 * (limit && limit < FAR * used ? Math.max(limit, used) : used);
    const x = (s) => left + (s - low) / (high - low) * (right - left);
    const y = (b) => bottom - b / most * (bottom - top);
    yAxis(ctx, left, right, top, bottom, most, bytes);
    xAxis(ctx, left, right, bottom, low, high);
    ctx.fillStyle = css("--soft");
    ctx.textAlign = "right";
    ctx.fillText("step (predicted)", right, bottom + 30);
    ctx.textAlign = "left";
    ctx.fillText("memory of the fullest rank (predicted)", left, 8);
    if (limit && limit <= most) capacityLine(ctx, left, right, y(limit), `capacity ${bytes(limit)}`);
    if (bound_s) {
      ctx.fillStyle = css("--good");
      ctx.fillRect(x(bound_s), top, 1.5, bottom - top);
      ctx.textAlign = "left";
      ctx.fillText("nothing searched is faster (proven)", x(bound_s) + 6, bottom - 12);
    }
    this.spots = points.map((point, i) => [x(point.step_s), y(point.bytes)]);
    for (let i = points.length - 1; i >= 0; i--) {
      const [cx, cy] = this.spots[i];
      ctx.fillStyle = this.colour(points[i], i);
      ctx.strokeStyle = css("--back");
      ctx.beginPath();
      if (points[i].fits) ctx.arc(cx, cy, i ? 6 : 8, 0, 2 * Math.PI);
      else ctx.rect(cx - 5, cy - 5, 10, 10);
      ctx.fill();
      ctx.stroke();
    }
    legend("scatter-legend", [["this plan", css("--c1")], ["fits", css("--c0")],
      ["refused: does not fit (square)", css("--c7")]]);
    const refused = points.filter((point) => !point.fits).length;
    document.getElementById("scatter-status").textContent =
      `${points.length - 1} other plans in the file, ${refused} of all shown do not fit`;
  }
  describe(event) {
    const near = this.spots.map(([x, y], i) => [Math.hypot(x - event.offsetX, y - event.offsetY), i])
      .filter(([distance]) => distance < 14).sort((a, b) => a[0] - b[0]).slice(0, 3);
    return near.map(([, i]) => {
      const point = this.data.points[i];
      return `${point.text}\n${seconds(point.step_s)}, ${bytes(point.bytes)} (predicted)` +
        (point.fits ? "" : ", does not fit");
    }).join("\n");
  }
}

function startTheme(redraw) {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => { root.dataset.theme = name; };
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => { set(dark.matches ? "dark" : "light"); redraw(); });
  document.getElementById("theme").addEventListener("click", () => {
    set(root.dataset.theme === "dark" ? "light" : "dark");
    redraw();
  });
}

async function readData() {
  const text = document.getElementById("data").textContent;
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function start() {
  let parts = [];
  const redraw = () => parts.forEach((draw) => draw());
  startTheme(redraw);
  const data = await readData();
  const timeline = new Timeline(data), memory = new MemoryOverTime(data);
  const scatter = new Scatter(data), select = document.getElementById("memory-rank");
  const choose = (rank) => { select.value = String(rank); memory.show(rank); };
  const peaks = new Peaks(data, choose);
  select.addEventListener("change", () => memory.show(Number(select.value)));
  memory.show(Number(select.value));
  parts = [() => timeline.draw(), () => timeline.legend(), () => peaks.draw(),
    () => memory.draw(), () => drawMap(data.parameters), () => scatter.draw()];
  redraw();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) { width = innerWidth; requestAnimationFrame(redraw); }
  });
  document.documentElement.dataset.ready = "yes";
}
start();
