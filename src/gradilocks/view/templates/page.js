// Colors the plots for the light or dark theme of the system.
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function color() {
  if (!window.Plotly) return;
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim(), rule = style.getPropertyValue("--rule").trim();
  for (const plot of document.querySelectorAll(".plotly-graph-div")) {
    const update = { "font.color": ink, "hoverlabel.bgcolor": style.getPropertyValue("--card").trim(), "hoverlabel.font.color": ink };
    for (const name of Object.keys(plot.layout)) {
      if (/^[xy]axis\d*$/.test(name)) Object.assign(update, { [name + ".gridcolor"]: rule, [name + ".linecolor"]: rule });
    }
    Plotly.relayout(plot, update).then(() => { plot.dataset.ready = "yes"; });
  }
}

color();
dark.addEventListener("change", color);
