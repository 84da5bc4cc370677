"use strict";
(() => {
  const root = document.documentElement;
  const scheme = document.getElementById("scheme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.scheme ? root.dataset.scheme === "dark" : dark.matches);
  const label = () => { scheme.textContent = isDark() ? "Light colours" : "Dark colours"; };
  const kept = (act) => { try { return act(localStorage); } catch { return null; } };  // refused for some local files
  const wanted = kept((store) => store.getItem("headstart-scheme"));
  if (wanted === "dark" || wanted === "light") root.dataset.scheme = wanted;
  scheme.addEventListener("click", () => {
    root.dataset.scheme = isDark() ? "light" : "dark";
    kept((store) => store.setItem("headstart-scheme", root.dataset.scheme));
    label();
  });
  dark.addEventListener("change", label);
  label();
  const all = () => [...document.querySelectorAll("details")];
  const toggle = document.getElementById("open-all");
  toggle.addEventListener("click", () => {
    const open = all().some((details) => !details.open);
    all().forEach((details) => { details.open = open; });
    toggle.textContent = open ? "Close all details" : "Open all details";
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all().filter((details) => !details.open);
    closed.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((details) => { details.open = false; }));
  scheme.hidden = toggle.hidden = false;
})();
