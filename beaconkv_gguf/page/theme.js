// Loaded before the first paint, so that the page does not flash in the other theme.
const themes = ["auto", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = themes.includes(theme) ? theme : "auto";
}

try {
  setTheme(JSON.parse(localStorage.getItem("beaconkv.theme")));
} catch {
  setTheme("auto"); // storage is switched off, or damaged
}
