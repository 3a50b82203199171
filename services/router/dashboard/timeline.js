// The Gantt chart: one row per machine, in it one lane per request that ran at the same time.

const GUTTER = 132, AXIS = 22, LANE = 5, MAX_LANES = 16, PAD = 3, MIN_ROW = 15;

export class Timeline {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.machines = [];
    this.requests = [];
    this.spanMs = 30_000;
    this.chosen = null;
    this.marks = [];
    canvas.addEventListener("click", (event) => {
      const mark = this.at(event.offsetX, event.offsetY);
      if (mark) onPick(mark.request);
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.requests.length) return;
      event.preventDefault();
      onPick(this.beside(step));
    });
    canvas.addEventListener("mousemove", (event) => {
      const mark = this.at(event.offsetX, event.offsetY);
      canvas.title = mark ? `${mark.request.request_id}: ${mark.what}` : "";
    });
  }

  update(machines, requests) {
    const order = { prompt: 0, token: 1 };
    this.machines = [...machines].sort(
      (a, b) => (order[a.home] ?? 2) - (order[b.home] ?? 2) || a.id.localeCompare(b.id, "en", { numeric: true }));
    this.requests = requests;
  }

  // The request before or after the chosen one; the last finished one when none is chosen.
  beside(step) {
    const ordered = [...this.requests].sort((a, b) => a.began_unix_ms - b.began_unix_ms);
    const index = ordered.findIndex((request) => request.request_id === this.chosen);
    const last = ordered.findLastIndex((request) => request.outcome !== "running");
    const wanted = index < 0 ? last : index + step;
    return ordered[Math.min(Math.max(wanted, 0), ordered.length - 1)];
  }

  at(x, y) {
    return this.marks.findLast((mark) => x >= mark.x - 1 && x <= mark.x + mark.width + 1 && y >= mark.y - 1 && y <= mark.y + LANE);
  }

  // Bars by machine id: what ran there from when to when.
  bars(now) {
    const rows = new Map(this.machines.map((machine) => [machine.id, []]));
    for (const request of this.requests) {
      const began = request.began_unix_ms;
      const end = request.outcome === "running" ? now : began + (request.e2e_us ?? 0) / 1e3;
      const assigned = began + (request.queued_us ?? 0) / 1e3;
      const first = request.ttft_us ? began + request.ttft_us / 1e3 : end;
      const failed = !["running", "stop", "length", "cancelled"].includes(request.outcome);
      rows.get(request.prompt_machine)?.push({ request, from: began, to: first, parts: [
        { from: began, to: assigned, tone: "queue", what: "waiting" },
        { from: assigned, to: first, tone: failed && !request.ttft_us ? "failed" : "prompt", what: "prompt phase" },
      ] });
      if (!request.ttft_us || end <= first || !request.token_machine) continue;
      const exposed = request.pushing ? end : Math.min(end, first + (request.transfer?.exposed_us ?? 0) / 1e3);
      rows.get(request.token_machine)?.push({ request, from: first, to: end, parts: [
        { from: first, to: exposed, tone: "exposed", what: "exposed transfer" },
        { from: exposed, to: end, tone: failed ? "failed" : "token", what: "token phase" },
      ] });
    }
    return rows;
  }

  // Puts each bar into the first lane that is free when it begins.
  static lanes(bars) {
    bars.sort((a, b) => a.from - b.from);
    const free = [];
    for (const bar of bars) {
      let lane = free.findIndex((until) => until <= bar.from);
      if (lane < 0) lane = free.length < MAX_LANES ? free.length : bars.indexOf(bar) % MAX_LANES;
      free[lane] = Math.max(free[lane] ?? 0, bar.to);
      bar.lane = lane;
    }
    return free.length;
  }

  draw(now) {
    const begin = now - this.spanMs;
    const rows = this.bars(now);
    let y = AXIS;
    const layout = this.machines.map((machine) => {
      const bars = rows.get(machine.id).filter((bar) => bar.to >= begin && bar.from <= now);
      const lanes = Timeline.lanes(bars);
      const row = { machine, bars, y, height: Math.max(MIN_ROW, lanes * LANE + 2 * PAD) };
      y += row.height;
      return row;
    });
    this.paint(layout, begin, now, y + 4);
  }

  paint(layout, begin, now, height) {
    const canvas = this.canvas, width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    const x = (at) => GUTTER + (at - begin) / (now - begin) * (width - GUTTER);
    this.axis(pen, color, x, now, height);
    this.marks = [];
    for (const row of layout) this.row(pen, color, x, row, width, begin);
  }

  axis(pen, color, x, now, height) {
    const step = this.spanMs / 6;
    pen.textAlign = "center";
    for (let back = 0; back <= 6; back++) {
      const at = x(now - back * step);
      pen.fillStyle = color("line");
      pen.fillRect(at, AXIS - 4, 1, height);
      pen.fillStyle = color("soft");
      pen.textAlign = back === 0 ? "right" : "center";
      if (back < 6) pen.fillText(back ? `−${+(back * step / 1e3).toFixed(1)} s` : "now", at, AXIS / 2);
    }
  }

  row(pen, color, x, row, width, begin) {
    const { machine, bars } = row;
    pen.fillStyle = color("line");
    pen.fillRect(0, row.y, width, 1);
    pen.fillStyle = color(machine.home === "prompt" ? "prompt" : "token");
    pen.fillRect(0, row.y + 2, 3, row.height - 3);
    if (machine.pool === "mixed") {
      pen.fillStyle = color("mixed");
      pen.fillRect(4, row.y + 2, 3, row.height - 3);
    }
    pen.fillStyle = color(machine.state === "lost" ? "failed" : "ink");
    pen.textAlign = "left";
    pen.fillText(shorten(pen, machine.id, GUTTER - 18), 11, row.y + row.height / 2);
    for (const bar of bars) {
      const y = row.y + PAD + bar.lane * LANE;
      const dim = this.chosen && this.chosen !== bar.request.request_id;
      pen.globalAlpha = dim ? 0.35 : 1;
      for (const part of bar.parts) {
        if (part.to <= part.from || part.to < begin) continue;
        const left = Math.max(GUTTER, x(part.from)), size = Math.max(1, x(part.to) - left);
        pen.fillStyle = color(part.tone);
        pen.fillRect(left, y, size, LANE - 1);
        this.marks.push({ x: left, y, width: size, request: bar.request, what: part.what });
      }
      pen.globalAlpha = 1;
    }
  }
}

function shorten(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(text.slice(0, length) + "…").width > width) length--;
  return text.slice(0, length) + "…";
}
