// The page itself: signing in, the bar, and which view is shown. The address after # names the view.

import { allowRequests, dropRequests, hasKey, signIn, signOut } from "./api.js";
import { el, link, say, show } from "./dom.js";
import { Store } from "./store.js";
import { historyView } from "./view_history.js";
import { jobView } from "./view_job.js";
import { jobsView } from "./view_jobs.js";
import { nowView } from "./view_now.js";
import { usageView } from "./view_usage.js";
import { whatIfView } from "./view_whatif.js";

const VIEWS = [
  { hash: "/", label: "Now", make: nowView },
  { hash: "/jobs", label: "Jobs", make: jobsView },
  { hash: "/history", label: "History", make: historyView },
  { hash: "/what-if", label: "What if", make: whatIfView },
  { hash: "/usage", label: "Usage", make: usageView },
];
const bar = document.getElementById("bar");
const main = document.getElementById("main");
const notice = document.getElementById("notice");
let store = null;
let view = null; // { node, update, close }
let stopListening = () => {};

function route() {
  const path = location.hash.slice(1) || "/";
  const job = path.match(/^\/jobs?\/(\d{1,18})$/);
  if (job) return { label: `Job ${job[1]}`, hash: "/jobs", make: (held) => jobView(held, job[1]) };
  return VIEWS.find((one) => one.hash === path) ?? VIEWS[0];
}

function drawBar(chosen) {
  const tabs = VIEWS.map((one) => el("a", { href: `#${one.hash}`, "aria-current": one.hash === chosen.hash ? "page" : null }, one.label));
  show(bar,
    el("a", { href: "#/", class: "brand", "aria-label": "Carpool, now" }, el("img", { src: "/ui/icon.svg", alt: "", width: 26, height: 26 }), el("span", {}, "Carpool")),
    el("nav", { "aria-label": "Views" }, tabs),
    el("span", { class: "who" }, store.me.name),
    el("button", { type: "button", class: "plain", onclick: leave }, "Sign out"));
}

function draw() {
  const chosen = route();
  stopListening();
  view?.close?.();
  drawBar(chosen);
  document.title = `${chosen.label} · Carpool`;
  view = chosen.make(store);
  show(main, view.node);
  view.update?.();
  stopListening = store.listen(() => {
    tellConnection();
    view.update?.();
  });
}

function tellConnection() {
  const text = store.connected ? (store.error ?? "") : "The connection is lost. It is tried again; what you see may be old.";
  say(notice, text);
  notice.classList.toggle("shown", text !== "");
}

async function leave() {
  close();
  await signOut();
  drawSignIn();
}

function close() {
  stopListening();
  view?.close?.();
  view = null;
  store?.stop();
  store = null;
  dropRequests();
}

function drawSignIn(problem = "") {
  document.title = "Sign in · Carpool";
  say(notice, "");
  notice.classList.remove("shown");
  show(bar);
  const token = el("input", { id: "token", type: "password", autocomplete: "current-password", required: true, maxlength: 200, spellcheck: "false", "aria-describedby": "token-help" });
  const said = el("p", { class: "problem", role: "alert" }, problem);
  const enter = async (event) => {
    event.preventDefault();
    try {
      await signIn(token.value.trim());
    } catch (error) {
      say(said, error.message);
      return;
    }
    await begin();
  };
  show(main, el("form", { class: "card sign-in", onsubmit: enter },
    el("img", { src: "/ui/icon.svg", alt: "", width: 48, height: 48 }),
    el("h1", {}, "Sign in to Carpool"),
    el("label", { for: "token" }, "Token"),
    token,
    el("p", { id: "token-help", class: "quiet" }, "The administrator gives you one. Your own service keeps its token in the file admin.token of its home directory."),
    said,
    el("button", { type: "submit" }, "Sign in")));
  token.focus();
}

async function begin() {
  allowRequests();
  store = new Store();
  store.onSignedOut = () => {
    close();
    drawSignIn("The session is over.");
  };
  try {
    await store.start();
  } catch (error) {
    close();
    drawSignIn(error.status === 401 ? "" : error.message);
    return;
  }
  draw();
}

window.addEventListener("hashchange", () => {
  if (store === null) return;
  draw();
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
});

if (hasKey()) begin();
else drawSignIn();
