// Draws what the page's JSON holds with uPlot: the timeline, the curves, and the trends of an index page.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const plots = [];
  const at = (id) => document.getElementById(id);

  function make(element, options, values) {
    const plot = new uPlot({ width: Math.max(280, element.clientWidth), ...options }, values, element);
    element.plot = plot;
    plots.push(plot);
    return plot;
  }

  const axis = (more) => ({
    stroke: () => css("dim"),
    grid: { stroke: () => css("line"), width: 1 },
    ticks: { stroke: () => css("line"), width: 1 },
    font: "12px system-ui, sans-serif",
    ...more,
  });

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);

  function showTip(plot, lines) {
    tip.hidden = !lines.length;
    if (!lines.length) return;
    tip.textContent = lines.join("\n");
    const box = plot.over.getBoundingClientRect();
    const x = box.left + plot.cursor.left, y = box.top + plot.cursor.top;
    const room = document.documentElement.clientWidth;
    tip.style.left = Math.max(4, Math.min(x + 14, room - tip.offsetWidth - 4)) + scrollX + "px";
    tip.style.top = y + 18 + scrollY + "px";
  }

  // ---- timeline --------------------------------------------------------------------------------------------------
  const LANE = 26, LABEL = 84;
  const inWords = (s) => s < 1 ? Math.round(s * 1000) + " ms" : s.toFixed(s < 10 ? 3 : s < 100 ? 2 : 1) + " s";

  function timeline(element, tools) {
    const { lanes, spans, steps, marks, shades, end } = data.timeline;
    if (!lanes.length) return;
    const items = lanes.map(() => []);
    for (const [lane, begin, over, kind, label] of spans) items[lane].push({ begin, over, kind, label });
    for (const [lane, attempt, first, last, begin, over, ...phases] of steps) {
      items[lane].push({ begin, over, kind: "step", attempt, first, last, phases });
    }
    for (const [lane, begin, kind, label] of marks) items[lane].push({ begin, over: begin, kind, label, mark: true });
    const shown = { phases: true, checkpoints: true, collectives: true, probes: true };
    let rows = lanes.map((_, lane) => lane);

    function wanted(item) {
      const kind = item.kind.split(" ")[0];
      if (kind === "save" || kind === "load") return shown.checkpoints;
      return kind === "call" ? shown.collectives : true;
    }

    function part(item, top, height) {  // where in its lane an item is drawn
      const kind = item.kind.split(" ")[0];
      if (kind === "attempt" || item.mark) return [top + 1, height - 2];
      if (kind === "call") return [top + 2, height * 0.2];
      if (kind === "save" || kind === "load") return [top + height * 0.76, height * 0.2];
      if (kind === "step") return [top + height * 0.26, height * 0.46];
      return [top + height * 0.18, height * 0.64];
    }

    function draw(plot) {
      const { ctx, bbox } = plot, ratio = uPlot.pxRatio, height = bbox.height / rows.length;
      const x = (seconds) => plot.valToPos(seconds, "x", true);
      const from = plot.scales.x.min, to = plot.scales.x.max;
      const colour = Object.fromEntries(["attempt", "step", "data", "forward", "backward", "optimizer", "save", "load",
        "call", "bad", "fault", "mark", "ink", "dim", "line", "part-a", "part-b"].map((n) => [n, css(n)]));
      ctx.save();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      rows.forEach((lane, row) => {
        const top = bbox.top + row * height;
        ctx.fillStyle = colour.dim;
        ctx.textAlign = "right";
        ctx.fillText(lanes[lane].name, bbox.left - 6 * ratio, top + height / 2, bbox.left - 8 * ratio);
        ctx.fillStyle = colour.line;
        ctx.fillRect(bbox.left, Math.round(top + height) - 1, bbox.width, 1);
      });
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.textAlign = "left";
      rows.forEach((lane, row) => {
        const top = bbox.top + row * height;
        let before = -1, partNumber = 0;
        for (const item of items[lane]) {
          if (item.over < from || item.begin > to || !wanted(item)) { partNumber += item.kind.startsWith("part"); continue; }
          const left = x(item.begin), width = Math.max(x(item.over) - left, 1), [y, h] = part(item, top, height);
          const [kind, bad] = item.kind.split(" ");
          if (kind === "step") {
            if (width <= 1 && Math.round(left) === before) continue;  // another one is drawn in this pixel
            before = Math.round(left);
            ctx.fillStyle = colour.step;
            ctx.fillRect(left, y, Math.max(width - (width > 4 * ratio ? 1 : 0), 1), h);
            const sum = item.phases.reduce((a, b) => a + b, 0);
            if (shown.phases && width > 5 * ratio && sum > 0) {
              let time = Math.max(item.begin, item.over - sum);
              const scale = Math.min(1, (item.over - item.begin) / sum);
              item.phases.forEach((took, number) => {
                ctx.fillStyle = colour[data.phases[number]];
                const a = x(time), b = x(time + took * scale);
                ctx.fillRect(a, y, Math.max(b - a - 0.5, 0.5), h);
                time += took * scale;
              });
            }
          } else if (item.mark) {
            ctx.fillStyle = kind === "hit" ? colour.bad : kind === "exit" ? colour[bad ? "bad" : "dim"] : colour.mark;
            ctx.fillRect(left - ratio, y, 2 * ratio, h);
            ctx.beginPath();
            ctx.moveTo(left - 4 * ratio, y); ctx.lineTo(left + 4 * ratio, y); ctx.lineTo(left, y + 6 * ratio);
            ctx.fill();
          } else {
            ctx.fillStyle = bad === "bad" || bad === "open" ? colour.bad
              : kind === "part" ? colour[partNumber++ % 2 ? "part-b" : "part-a"] : colour[kind] || colour.dim;
            ctx.fillRect(left, y, width, h);
            const label = kind === "part" || kind === "fault" ? item.label : "";
            if (label && ctx.measureText(label).width + 8 * ratio < width) {
              ctx.fillStyle = colour.ink;
              ctx.fillText(label, Math.max(left, bbox.left) + 4 * ratio, y + h / 2 + ratio);
            }
          }
        }
      });
      for (const [begin, over] of shades) {
        ctx.globalAlpha = 0.13;
        ctx.fillStyle = colour.fault;
        ctx.fillRect(x(begin), bbox.top, Math.max(x(over) - x(begin), 1), bbox.height);
        ctx.globalAlpha = 1;
        ctx.fillRect(x(begin), bbox.top, Math.max(1, ratio), bbox.height);
      }
      ctx.restore();
    }

    function say(item) {
      if (item.kind !== "step") {
        const when = item.mark ? `at ${item.begin.toFixed(3)} s` : `${item.begin.toFixed(3)} to ${item.over.toFixed(3)} s, ${inWords(item.over - item.begin)}`;
        return [item.label, when];
      }
      const steps = item.first === item.last ? `step ${item.first}` : `steps ${item.first} to ${item.last}`;
      const spent = item.phases.map((took, n) => took ? `${data.phases[n]} ${inWords(took)}` : "").filter(Boolean);
      return [`${steps}, attempt ${item.attempt}`, `ended at ${item.over.toFixed(3)} s, took ${inWords(item.over - item.begin)}`, spent.join(", ")].filter(Boolean);
    }

    function hover(plot) {
      const { left, top } = plot.cursor;
      if (left == null || left < 0 || top < 0) return showTip(plot, []);
      const height = plot.over.clientHeight / rows.length, row = Math.floor(top / height);
      const lane = rows[row], time = plot.posToVal(left, "x"), near = plot.posToVal(left + 4, "x") - time;
      const hit = (items[lane] || []).filter((item) => {
        if (!wanted(item) || item.begin - near > time || item.over + near < time) return false;
        const [y, h] = part(item, row * height, height);
        return item.kind === "attempt" || (top >= y - 1 && top <= y + h + 1);
      });
      const best = hit.sort((a, b) => (a.kind === "attempt") - (b.kind === "attempt") || !a.mark - !b.mark || (a.over - a.begin) - (b.over - b.begin))[0];
      showTip(plot, best ? [lanes[lane].name + ": " + say(best)[0], ...say(best).slice(1)] : []);
    }

    const points = Array.from({ length: 2001 }, (_, n) => (end || 1) * n / 2000);
    const high = () => rows.length * LANE + 36;
    const plot = make(element, {
      height: high(), padding: [4, 22, 0, LABEL], legend: { show: false },
      scales: { x: { time: false, range: (_, min, max) => [min, max] }, y: { range: [0, 1] } },
      series: [{}, { paths: () => null, points: { show: false } }],
      axes: [axis({ size: 32, values: (_, splits) => splits.map((s) => s.toLocaleString("en", { maximumFractionDigits: 3 }) + " s") }), { show: false }],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      hooks: { draw: [draw], setCursor: [hover] },
    }, [points, points.map(() => null)]);

    const zoom = (min, max) => plot.setScale("x", { min: Math.max(0, min), max: Math.min(end || 1, max) });
    const by = (factor) => () => {
      const { min, max } = plot.scales.x, middle = (min + max) / 2, half = (max - min) / 2 * factor;
      zoom(middle - half, middle + half);
    };
    const button = (text, act) => {
      const found = document.createElement("button");
      found.type = "button";
      found.textContent = text;
      found.onclick = act;
      tools.append(found);
    };
    button("All", () => zoom(0, end));
    if (shades.length) {  // what counts is near the faults; the rest is one click away
      const first = Math.min(...shades.map(([begin]) => begin)), last = Math.max(...shades.map(([, over]) => over));
      const room = Math.max(1, (last - first) * 0.25);
      if (last - first + 2 * room < 0.8 * end) zoom(first - room, last + room);
    }
    button("+", by(0.5));
    button("−", by(2));
    shades.slice(0, 6).forEach(([begin, over, label]) => {
      button("Fault: " + label, () => { const room = Math.max(0.5, (over - begin) * 0.25); zoom(begin - room, over + room); });
    });
    const choose = () => {
      const text = tools.querySelector("input[type=search]").value.trim();
      const ranks = new Set();
      for (const piece of text.split(/[\s,]+/).filter(Boolean)) {
        const [low, high] = piece.split("-").map(Number);
        for (let rank = low; rank <= Math.min(high ?? low, 99999); rank++) ranks.add("rank " + rank);
      }
      rows = lanes.map((_, lane) => lane).filter((lane) => lanes[lane].kind === "rank" ? !ranks.size || ranks.has(lanes[lane].name)
        : lanes[lane].name !== "probes" || shown.probes);
      plot.setSize({ width: plot.width, height: high() });
      plot.redraw(false);
    };
    for (const name of Object.keys(shown)) {
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.checked = true;
      box.name = name;
      box.onchange = () => { shown[name] = box.checked; choose(); };
      label.append(box, " " + name);
      tools.append(label);
    }
    const label = document.createElement("label"), field = document.createElement("input");
    field.type = "search";
    field.placeholder = "0-3, 7";
    field.size = 8;
    field.oninput = choose;
    label.append("ranks ", field);
    tools.append(label);
    tools.hidden = false;
  }

  // ---- curves ----------------------------------------------------------------------------------------------------
  let following = false;
  const curves = [];

  function curve(element, title, columns, more = {}) {
    const known = columns.filter(([, values]) => values.some((value) => value !== null));
    if (!known.length) { element.remove(); return; }
    const { steps, resumes, faults, first_difference: first } = data.curves;
    const follow = (plot, key) => {
      if (key !== "x" || following) return;
      following = true;
      for (const other of curves) if (other !== plot) other.setScale("x", { min: plot.scales.x.min, max: plot.scales.x.max });
      following = false;
    };
    const lines = (plot) => {
      const { ctx, bbox } = plot, ratio = uPlot.pxRatio;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "top";
      ctx.textAlign = "left";
      const line = (step, colour, text, row) => {
        const x = plot.valToPos(step, "x", true);
        ctx.fillStyle = colour;
        ctx.fillRect(x, bbox.top, Math.max(1, ratio), bbox.height);
        const wide = ctx.measureText(text).width + 5 * ratio;
        ctx.fillText(text, x + wide > bbox.left + bbox.width ? x - wide : x + 4 * ratio, bbox.top + (3 + 13 * row) * ratio);
      };
      resumes.forEach((step) => line(step, css("dim"), `resumed from ${step}`, 0));
      if (first) line(first.step, css("bad"), `first difference: step ${first.step}`, 1);
      faults.forEach(([step, label]) => line(step, css("mark"), `${label}: step ${step}`, 2));
      ctx.restore();
    };
    const plot = make(element, {
      title, height: 260, padding: [8, 12, 0, 0],
      scales: { x: { time: false }, y: more.y || {} },
      series: [{ label: "step", value: (_, value) => value ?? "" }, ...known.map(([label, , colour, dash, width]) => ({
        label, stroke: () => css(colour), width: width || 1.5, dash: dash || [], points: { show: known[0][1].length < 60, size: 4 },
        value: (_, value) => value === null || value === undefined ? "" : String(value), spanGaps: false,
      }))],
      axes: [axis({ size: 30 }), axis({ size: 64, values: (_, splits) => splits.map((v) => v === null ? "" : String(Number(v.toPrecision(4)))) })],
      cursor: { sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false } },
      hooks: { draw: [lines], setScale: [follow] },
    }, [steps, ...known.map(([, values]) => values)]);
    curves.push(plot);
  }

  function allCurves() {
    const { loss, twin_loss, first_loss, lr, twin_lr, apart } = data.curves;
    curve(at("loss-chart"), "loss", [["twin", twin_loss, "twin", [], 4], ["run", loss, "run"], ["steps that were lost", first_loss, "bad", [4, 3]]]);
    curve(at("apart-chart"), "relative difference from the twin's loss", [["apart", apart.map((value) => value > 0 ? value : null), "bad"]], { y: { distr: 3 } });
    curve(at("lr-chart"), "learning rate", [["twin", twin_lr, "twin", [], 4], ["run", lr, "run"]]);
  }

  function overTime(element, one) {
    const colours = ["run", "mark", "save", "bad", "call", "forward", "backward", "optimizer", "load", "data", "twin", "dim"];
    make(element, {
      title: one.title, height: 200, padding: [8, 12, 0, 0], scales: { x: { time: false }, y: { range: (_, _min, max) => [0, (max || 1) * 1.1] } },
      series: [{ label: "s", value: (_, value) => value ?? "" }, ...one.lines.map(([label], n) => ({
        label, stroke: () => css(colours[n % colours.length]), width: 1.5, spanGaps: true, points: { show: one.times.length < 60, size: 4 },
        value: (_, value) => value === null || value === undefined ? "" : String(value),
      }))],
      axes: [axis({ size: 30, values: (_, splits) => splits.map((s) => s + " s") }), axis({ size: 56 })],
      cursor: { sync: { key: "gpus", scales: ["x", null] }, drag: { x: true, y: false } },
    }, [one.times, ...one.lines.map(([, values]) => values)]);
  }

  // ---- index page ------------------------------------------------------------------------------------------------
  function trend(element, one) {
    const runs = one.runs;
    const bounds = runs.map((run) => run.bound ?? null), bounded = bounds.some((bound) => bound !== null);
    const name = (n) => runs[n] ? `${runs[n].commit || runs[n].started}: ${runs[n].verdict}` : "";
    make(element, {
      title: one.scenario, height: 200, padding: [8, 12, 0, 0],
      scales: { x: { time: false, range: (_, min, max) => [min - 0.5, max + 0.5] }, y: { range: (_, _min, max) => [0, (max || 1) * 1.1] } },
      series: [{ label: "run", value: (_, n) => n === null ? "" : name(n) }, {
        label: one.label, stroke: () => css("run"), width: 1.5, points: { show: true, size: 7 }, value: (_, v) => v === null ? "–" : String(v),
      }, ...(bounded ? [{ label: "bound", stroke: () => css("bad"), width: 1, dash: [4, 3], points: { show: false }, value: (_, v) => v === null ? "" : String(v) }] : [])],
      axes: [axis({ incrs: [1, 2, 5, 10, 20, 50, 100], values: (_, splits) => splits.map((n) => runs[n] ? runs[n].commit || String(n + 1) : "") }), axis({ size: 56 })],
      cursor: { drag: { x: true, y: false } },
    }, [runs.map((_, n) => n), runs.map((run) => run.value), ...(bounded ? [bounds] : [])]);
  }

  function filterRows(field, rows, text = (row) => row.textContent) {
    if (!field) return;
    field.oninput = () => {
      const wanted = field.value.toLowerCase();
      for (const row of rows) row.hidden = !text(row).toLowerCase().includes(wanted);
    };
  }

  if (data.timeline) timeline(at("timeline-chart"), at("timeline-tools"));
  if (data.curves && at("loss-chart")) allCurves();
  (data.gpus || []).forEach((one, n) => overTime(at("gpu-chart-" + n), one));
  (data.trends || []).forEach((one, n) => trend(at("trend-" + n), one));
  filterRows(at("log-filter"), document.querySelectorAll("pre.log > span"));
  filterRows(at("run-filter"), document.querySelectorAll("#runs tbody tr"));

  // On a narrow screen, a row of a wide table becomes a card: each value with the name of its column.
  for (const table of document.querySelectorAll(".scroll table")) {
    const names = [...table.querySelectorAll("thead :is(th, td)")].map((one) => one.textContent);
    if (names.length < 5) continue;
    table.classList.add("cards");
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, n) => (cell.dataset.name = names[n]));
  }

  const fit = (width) => {
    for (const plot of plots) plot.setSize({ width: width || Math.max(280, plot.root.parentNode.clientWidth), height: plot.height });
  };
  new ResizeObserver(() => fit()).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw()));
  addEventListener("beforeprint", () => { document.documentElement.className = "print"; fit(680); });
  addEventListener("afterprint", () => { document.documentElement.className = ""; fit(); });
})();
