// Draws the plots of a report and keeps them in the colours of the page.
"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => innerWidth < 700;
  const RUNS = 7;
  // The words of so many runs on where their NaN begins, each in a row of so many pixels.
  const MOST_TOLD = 4, MARK_HEIGHT = 17;
  const DASHES = ["solid", "dot", "dashdot", "longdash"];
  // Pale in the middle, so that what is usual recedes; blue and orange differ for every eye.
  const RATIO = {
    light: [[0, "#0b4f8a"], [0.25, "#5a9bd4"], [0.5, "#f1eee8"], [0.75, "#e8923b"], [1, "#9c4a00"]],
    dark: [[0, "#6cb8f5"], [0.25, "#3a76ab"], [0.5, "#3a3d43"], [0.75, "#c2762b"], [1, "#ffb765"]],
  };
  const SHARE = {
    light: [[0, "#f1eee8"], [0.5, "#e8923b"], [1, "#7a3a00"]],
    dark: [[0, "#2d3036"], [0.5, "#c2762b"], [1, "#ffc988"]],
  };

  // How many of a module's gradients have a magnitude: one hue, pale for few.
  const DENSITY = {
    light: [[0, "#e8f1f8"], [0.5, "#5a9bd4"], [1, "#08345f"]],
    dark: [[0, "#233140"], [0.5, "#3f83bd"], [1, "#cfe8ff"]],
  };
  const HISTOGRAMS = { activations: "run1", parameters: "run0" };
  // What becomes of a number in a format: the colour behind it, and that of its name.
  const FATES = { lost: "problem", subnormal: "warning", normal: "good", overflow: "problem" };

  const stored = () => { try { return localStorage.getItem("gradilocks-theme"); } catch { return null; } };
  const store = (name) => { try { localStorage.setItem("gradilocks-theme", name); } catch { /* not kept */ } };
  const theme = () => root.dataset.theme || (prefersDark.matches ? "dark" : "light");
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // What the reader has chosen for all plots of runs: the axis across, and how much to smooth.
  const chosen = { across: "step", smoothing: 0 };

  // --- what depends on the theme ---------------------------------------------------------------

  function coloured(trace) {
    const { run = 0, role, scale } = trace.meta;
    if (trace.type === "heatmap") {
      return { colorscale: { ratio: RATIO[theme()], share: SHARE[theme()], density: DENSITY[theme()] }[scale] || "Viridis" };
    }
    if (role in HISTOGRAMS) {
      const own = colour(HISTOGRAMS[role]);
      return { "line.color": own, fillcolor: `${own}38` };
    }
    const own = colour(`run${run % RUNS}`);
    if (role === "skip") {
      return { "marker.color": several() ? own : colour("skip"), "marker.line.color": colour("card") };
    }
    if (role === "band") return { fillcolor: `${own}40` };
    const line = ["limit", "GPU"].includes(role) && !several() ? colour("muted") : own;
    return { "line.color": line, "marker.color": line };
  }

  const several = () => document.querySelectorAll(".swatch").length > 0;

  function surroundings() {
    const ink = colour("muted"), grid = colour("grid"), back = colour("card");
    const axis = (name) => ({
      [`${name}.gridcolor`]: grid, [`${name}.linecolor`]: colour("rule"), [`${name}.zerolinecolor`]: grid,
      [`${name}.tickcolor`]: colour("rule"),
    });
    return {
      "font.color": ink, paper_bgcolor: back, plot_bgcolor: back, ...axis("xaxis"), ...axis("yaxis"),
      "hoverlabel.bgcolor": colour("page"), "hoverlabel.bordercolor": colour("muted"),
      "hoverlabel.font.color": colour("ink"), "legend.bgcolor": "rgba(0,0,0,0)",
      "modebar.color": ink, "modebar.activecolor": colour("accent"), "modebar.bgcolor": "rgba(0,0,0,0)",
    };
  }

  // --- figures ---------------------------------------------------------------------------------

  // The shares and logarithms of a heat map are its colours; what one points at are the numbers.
  function heated(trace) {
    const { scale, columns } = trace.meta;
    trace.customdata = trace.z;
    trace.text = trace.z.map(() => columns);
    trace.hoverongaps = false;
    const bar = {
      orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", ypad: 4, len: narrow() ? 0.9 : 0.4,
      thickness: 10, outlinewidth: 0, tickfont: { size: 12 }, ticklabelposition: "outside bottom",
    };
    if (scale === "density") Object.assign(bar, { yref: "container", yanchor: "top", ypad: 0 });
    trace.colorbar = bar;
    if (scale === "share") {
      Object.assign(trace, { zmin: 0, zmax: 1 });
      Object.assign(bar, { tickformat: ".0%", tickvals: [0, 0.25, 0.5, 0.75, 1] });
      return;
    }
    let low = Infinity, high = -Infinity;
    for (const row of trace.z) for (const value of row) {
      if (value > 0) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    if (high <= 0) { low = high = 1e-3; }
    // Twelve decades are all that eyes can tell apart in a colour bar; four, in one hue.
    let from = Math.max(Math.log10(low), Math.log10(high) - (scale === "density" ? 4 : 12)), to = Math.log10(high);
    if (scale === "ratio") {
      const reach = Math.min(5, Math.max(1, to + 3, -3 - from));
      [from, to] = [-3 - reach, -3 + reach];
    } else if (to - from < 0.5) { from -= 0.25; to += 0.25; }
    trace.z = trace.z.map((row) => row.map((v) => (v === null ? null : v > 0 ? Math.log10(v) : from)));
    Object.assign(trace, { zmin: from, zmax: to });
    const every = Math.max(1, Math.ceil((to - from) / 6));
    const ticks = [];
    for (let at = Math.ceil(from); at <= to; at += 1) if (at % every === 0) ticks.push(at);
    Object.assign(bar, { tickvals: ticks, ticktext: ticks.map((at) => (scale === "density" ? `${100 * 10 ** at}%` : `10<sup>${at}</sup>`)) });
    if (ticks.length < 2) {
      const ends = [from, (from + to) / 2, to];
      Object.assign(bar, { tickvals: ends, ticktext: ends.map((at) => (10 ** at).toPrecision(2)) });
    }
  }

  function drawn(trace) {
    const { run = 0, role } = trace.meta;
    if (trace.type === "heatmap") heated(trace);
    else if (role === "band") trace.line = { width: 0 };
    else if (role === "skip") trace.marker = { symbol: "x", size: 9, line: { width: 1 } };
    else {
      trace.line = { width: 1.75, dash: DASHES[Math.floor(run / RUNS) % DASHES.length], ...trace.line };
      if (trace.mode === "lines+markers") trace.marker = { size: dots(trace.y), line: { width: 0 } };
    }
    for (const [path, value] of Object.entries(coloured(trace))) put(trace, path, value);
    return trace;
  }

  // Of a few points each is marked, of many only those that no line reaches.
  function dots(y) {
    if (y.length <= 40) return 5;
    return y.map((value, at) => (value !== null && (y[at - 1] ?? null) === null && (y[at + 1] ?? null) === null ? 5 : 0));
  }

  function put(target, path, value) {
    const keys = path.split(".");
    const last = keys.pop();
    for (const key of keys) target = target[key] ??= {};
    target[last] = value;
  }

  // --- steps or time, smoothed or not ----------------------------------------------------------

  const UNITS = [["seconds", 1, 180], ["minutes", 60, 3 * 3600], ["hours", 3600, 72 * 3600], ["days", 86400, Infinity]];
  const ofRuns = Object.values(plots).filter((plot) => !plot.views);
  const longest = Math.max(0, ...ofRuns.flatMap((plot) => plot.traces.flatMap(({ meta }) => (meta.t || []).slice(-1))));
  const [unit, unitSeconds] = UNITS.find(([, , until]) => longest < until);

  const along = (places, seconds) => (chosen.across === "time" && seconds ? seconds.map((t) => t / unitSeconds) : places);
  const title = (plot) => (chosen.across === "time" && !plot.views ? `${unit} of training` : plot.x.title);

  // A running mean that forgets, as TensorBoard's: each value weighs `keep` times the one after it.
  function smoothed(values, keep) {
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = keep * mean + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return mean / weight;
    });
  }

  // From the smallest to the largest of each group of neighbours; a gap in the line is one in the band.
  function band(trace, x) {
    const { low, high, run } = trace.meta;
    const across = [], up = [];
    for (let from = 0; from < low.length; from += 1) {
      if (low[from] === null) continue;
      let to = from;
      while (to < low.length && low[to] !== null) to += 1;
      const here = x.slice(from, to);
      across.push(...here, ...here.slice().reverse(), null);
      up.push(...low.slice(from, to), ...high.slice(from, to).reverse(), null);
      from = to;
    }
    return { type: "scatter", mode: "lines", fill: "toself", hoverinfo: "skip", showlegend: false, x: across, y: up,
      name: trace.name, legendgroup: trace.legendgroup, meta: { run, role: "band" } };
  }

  // What plotly.js draws of a trace: itself, a band behind it, and its own values behind smoothed ones.
  function layers(trace) {
    const { t, low, high, smooth } = trace.meta;
    const x = along(trace.x, t);
    const made = { ...trace, x };
    const behind = [];
    if (low && low.length) {
      behind.push(band(trace, x));
      if (!trace.text) {
        made.customdata = low.map((value, at) => [value, high[at]]);
        made.hovertemplate = "%{y:.4g} (%{customdata[0]:.3g} to %{customdata[1]:.3g})<extra>%{fullData.name}</extra>";
      }
    }
    if (smooth && chosen.smoothing) {
      made.y = smoothed(trace.y, chosen.smoothing);
      made.mode = "lines";
      if (!behind.length) behind.push({ ...trace, x, opacity: 0.3, hoverinfo: "skip", hovertemplate: null, showlegend: false, meta: { ...trace.meta, role: "own" } });
    }
    return [...behind, made];
  }

  // All plots of a section begin and end together, so that what lies below each other is of one moment.
  function reach(canvas) {
    let low = Infinity, high = -Infinity, log = false;
    for (const other of canvas.closest(".plots").querySelectorAll(".canvas")) {
      for (const { x, meta } of plots[other.id].traces) {
        for (const at of along(x, meta.t)) { low = Math.min(low, at); high = Math.max(high, at); }
      }
      log ||= plots[other.id].x.type === "log";
    }
    if (!(low < high)) return undefined;
    if (log) [low, high] = [Math.log10(Math.max(low, high / 1e6)), Math.log10(high)];
    const room = 0.012 * (high - low);
    return [low - room, high + room];
  }

  // Where NaN begins: a line through the plot. Its words stand above it, on the side that has room,
  // and what else stands there, legend or colour bar, makes room for them.
  function marked(plot, layout, traces, height) {
    layout.shapes = [];
    layout.annotations = [];
    const marks = plot.marks || [];
    if (!marks.length) return;
    const [low, high] = layout.xaxis.range || [0, 1];
    const log = plot.x.type === "log";
    const told = Math.min(marks.length, MOST_TOLD) * MARK_HEIGHT + 8;
    layout.margin.t += told;
    const above = 1 + told / (height - layout.margin.t - layout.margin.b);
    layout.legend.y = above;
    for (const { colorbar } of traces) if (colorbar) colorbar.y = above;
    marks.forEach(({ x, t, run, words }, number) => {
      const [at] = along([x], [t]);
      const own = several() ? colour(`run${run % RUNS}`) : colour("problem");
      const place = log ? Math.log10(at) : at;
      layout.shapes.push({
        type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", layer: "above", name: "nan",
        line: { width: 1.5, dash: "dash", color: own },
      });
      if (number < MOST_TOLD) {
        layout.annotations.push({
          text: words, showarrow: false, x: place, y: 1, yref: "paper", yanchor: "bottom", yshift: MARK_HEIGHT * number,
          xanchor: place > (low + high) / 2 ? "right" : "left", name: "nan", font: { size: 12, color: own },
        });
      }
    });
  }

  function laidOut(plot, canvas, traces) {
    const width = canvas.clientWidth;
    const axis = (given) => ({
      automargin: true, ...given, title: { text: given.title || "", standoff: 12, font: { size: 13 } },
      ticks: "outside", ticklen: 4,
    });
    const layout = {
      font: { family: getComputedStyle(document.body).fontFamily, size: 13 },
      margin: { l: 56, r: 16, t: plot.heat ? 40 : plot.legend ? 36 : 12, b: 56 },
      dragmode: "zoom", hovermode: plot.heat ? "closest" : "x unified",
      uirevision: (plot.active || [chosen.across]).join(),
      hoverlabel: { align: "left", namelength: 40 },
      xaxis: {
        ...axis({ ...plot.x, title: title(plot) }), automargin: false, hoverformat: ",d", tickformat: ",~r",
        showgrid: !plot.heat, zeroline: false,
      },
      yaxis: { ...axis(plot.y), zeroline: false, showgrid: !plot.heat },
      showlegend: Boolean(plot.legend),
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemsizing: "constant" },
    };
    if (!plot.heat) {
      const of = chosen.across === "time" ? `%{x:,.4~g} ${unit}` : `${plot.x.title} %{x:,d}`;
      layout.xaxis.unifiedhovertitle = { text: plot.hover || of };
    }
    if (!plot.views) {
      layout.xaxis.range = reach(canvas);
      const [low, high] = layout.xaxis.range || [0, 0];
      if (chosen.across === "step" && high - low < 8 && plot.x.type !== "log") layout.xaxis.dtick = 1;
      marked(plot, layout, traces, canvas.clientHeight);
    }
    if (plot.heat && narrow()) {
      Object.assign(layout.yaxis, plot.short ? { ticktext: plot.short, tickfont: { size: 11 } } : { showticklabels: false });
    }
    for (const [path, value] of Object.entries(surroundings())) put(layout, path, value);
    if (plot.bands) windowed(plot, layout, width);
    return layout;
  }

  // A format's window: bands behind histograms, or over a heat map, with the names of fates.
  function windowed(plot, layout, width) {
    const rows = plot.rows || [""];
    const tall = (1 - 0.14 * (rows.length - 1)) / rows.length;
    const domain = (row) => [1 - (row + 1) * tall - row * 0.14, 1 - row * (tall + 0.14)];
    const axis = (row) => (row ? `y${row + 1}` : "y");
    Object.assign(layout.xaxis, { range: plot.range.slice(), hoverformat: null, dtick: apart(plot.range, width), tick0: 0 });
    layout.margin.t = plot.heat ? 70 : 64;
    layout.shapes = [];
    layout.annotations = [];
    if (plot.rows) {
      layout.xaxis.anchor = axis(rows.length - 1);
      layout.legend.y = 1 + 30 / (plot.height * 0.8);
      rows.forEach((title, row) => {
        layout[`yaxis${row ? row + 1 : ""}`] = { ...layout.yaxis, domain: domain(row), range: [0, plot.top], nticks: 5 };
        if (narrow()) layout[`yaxis${row ? row + 1 : ""}`].title = "";
        layout.annotations.push({
          text: `<b>${title}</b>`, showarrow: false, xref: "paper", x: 0, xanchor: "left", yref: `${axis(row)} domain`,
          y: 1, yanchor: "bottom", font: { size: 14, color: colour("ink") },
        });
      });
    }
    // Beside a heat map stand the names of its rows, which take this much, about.
    const across = width - layout.margin.l - layout.margin.r - (!plot.heat ? 0 : narrow() ? 40 : 180);
    const pixels = across / (plot.range[1] - plot.range[0]);
    for (const band of plot.bands) {
      const back = colour(`${FATES[band.fate]}-back`), name = colour(FATES[band.fate]);
      const yref = `${axis(band.row)} domain`;
      const solid = !plot.heat || band.fate === "normal" ? (plot.heat ? 0 : 1) : band.fate === "subnormal" ? 0.25 : 0.6;
      layout.shapes.push({
        type: "rect", x0: band.x0, x1: band.x1, y0: 0, y1: 1, yref, line: { width: 0 }, fillcolor: back, opacity: solid,
        layer: plot.heat ? "above" : "below", name: `band ${band.fate}`,
      });
      if (band.fate !== "lost") {
        layout.shapes.push({
          type: "line", x0: band.x0, x1: band.x0, y0: 0, y1: 1, yref, layer: "above", name: `edge ${band.fate}`,
          line: { width: 1.5, color: name },
        });
      }
      const from = Math.max(band.x0, plot.range[0]), to = Math.min(band.x1, plot.range[1]);
      const room = (to - from) * pixels;
      if (room < 16) continue;
      const words = [band.fate, band.share && `<b>${band.share}</b>`, band.ends].filter(Boolean).join("<br>");
      const upright = room < 6.8 * band.fate.length;
      if (upright && plot.heat) continue;
      layout.annotations.push({
        text: upright ? words.replaceAll("<br>", " ") : words, showarrow: false, x: (from + to) / 2, yref, y: 1,
        yanchor: plot.heat ? "bottom" : "top", yshift: plot.heat ? 0 : -3, textangle: upright ? -90 : 0,
        font: { size: 12, color: name }, name: `name ${band.fate}`,
      });
    }
    if (plot.moved) {
      const { from, to, words } = plot.moved;
      layout.annotations.push({
        text: words, x: to, ax: from, axref: "x", y: 0.55 * plot.top, ay: 0.55 * plot.top, yref: "y2", ayref: "y2",
        arrowhead: 2, arrowwidth: 1.5, arrowcolor: colour("muted"), font: { size: 13, color: colour("ink") },
        xanchor: "right", name: "move",
      });
    }
    for (const at of plot.before || []) {
      layout.shapes.push({
        type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "y domain", layer: "above", name: "edge at scale 1",
        line: { width: 1.5, dash: "dot", color: colour("ink") },
      });
    }
  }

  // Ticks at powers of two that are themselves round, as many as there is room for.
  function apart([from, to], width) {
    return [1, 2, 4, 8, 16, 32, 64].find((each) => ((to - from) / each) * 48 < width) || 128;
  }

  // A plot with views shows those that are on, over what they share.
  const shown = (plot) => Object.assign({}, plot, ...(plot.active || []).map((name) => plot.views[name]));

  function redraw(canvas, plot) {
    if (!window.Plotly) {
      document.getElementById("no-plots").hidden = false;
      return new Promise(() => {});
    }
    const now = shown(plot);
    const traces = structuredClone(now.traces).flatMap(layers).map(drawn);
    const layout = laidOut(now, canvas, traces);
    if (now.height) {
      canvas.style.height = `${now.height}px`;
      layout.height = now.height;
    }
    return Plotly.react(canvas, traces, layout, config);
  }

  // Named one by one: plotly.js adds buttons of its own, also one that uploads the chart. The empty
  // address keeps even that one at home. Names may hold dollar signs and are no mathematics.
  const config = {
    responsive: true, displaylogo: false, doubleClick: "reset+autosize", typesetMath: false,
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
    displayModeBar: "hover", // Above the plot, in a strip of its own: see style.css.
    showLink: false, showSendToCloud: false, showEditInChartStudio: false, plotlyServerURL: "",
  };

  // --- the page --------------------------------------------------------------------------------

  const canvases = [...document.querySelectorAll(".canvas")];

  // Zooming into the steps of one plot shows the same steps in all plots of its section.
  function follow(canvas, changed) {
    const zoomed = Object.keys(changed).some((key) => key.startsWith("xaxis.range"));
    if (!zoomed && !changed["xaxis.autorange"]) return;
    const range = canvas.layout.xaxis.range.slice();
    for (const other of canvas.closest(".plots").querySelectorAll(".canvas")) {
      const own = other.layout && other.layout.xaxis;
      if (other === canvas || !own) continue;
      if (zoomed && (own.range[0] !== range[0] || own.range[1] !== range[1])) {
        Plotly.relayout(other, { "xaxis.range": range.slice(), "xaxis.autorange": false });
      } else if (!zoomed && own.autorange !== true) {
        Plotly.relayout(other, { "xaxis.autorange": true });
      }
    }
  }

  function recolour() {
    for (const canvas of canvases) {
      if (canvas.data) redraw(canvas, plots[canvas.id]);
    }
    paint();
  }

  function paint() {
    for (const swatch of document.querySelectorAll(".swatch")) {
      swatch.style.background = colour(`run${swatch.dataset.run % RUNS}`);
    }
    button.textContent = theme() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${theme() === "dark" ? "light" : "dark"} theme`);
  }

  const button = document.getElementById("theme");
  if (["dark", "light"].includes(stored())) root.dataset.theme = stored();
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    store(root.dataset.theme);
    recolour();
  });
  prefersDark.addEventListener("change", recolour);

  // Names that had no room may have it now, and the other way round.
  let settling;
  addEventListener("resize", () => {
    clearTimeout(settling);
    settling = setTimeout(() => {
      for (const canvas of canvases) redraw(canvas, plots[canvas.id]);
    }, 150);
  });

  // Paper is light.
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; recolour(); });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    recolour();
  });

  const controls = document.querySelector(".controls");
  if (controls) {
    const across = controls.querySelector(".across"), smoothing = controls.querySelector(".smoothing");
    const moments = ({ type, meta }) => (meta.t || []).length - (type === "heatmap" ? 1 : 0);
    across.hidden = !(longest > 0 && ofRuns.some((plot) => plot.traces.some((trace) => moments(trace) > 1)));
    smoothing.hidden = !ofRuns.some((plot) => plot.traces.some(({ meta }) => meta.smooth));
    controls.hidden = across.hidden && smoothing.hidden;
    controls.addEventListener("input", () => {
      chosen.across = controls.querySelector("[name=across]:checked").value;
      chosen.smoothing = Number(controls.querySelector("#smoothing").value);
      controls.querySelector("output").textContent = chosen.smoothing ? chosen.smoothing.toFixed(2) : "off";
      for (const canvas of canvases) if (!plots[canvas.id].views) redraw(canvas, plots[canvas.id]);
    });
  }

  paint();
  for (const canvas of canvases) {
    const plot = plots[canvas.id];
    canvas.addEventListener("view", ({ detail }) => {
      plot.active = detail.filter((name) => name in plot.views);
      redraw(canvas, plot);
    });
    redraw(canvas, plot).then(() => {
      canvas.on("plotly_relayout", (changed) => follow(canvas, changed));
      canvas.dataset.ready = "yes";
    });
  }
})();
