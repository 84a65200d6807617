// Markdown, code and LaTeX of a model as safe HTML, also while it is being written.
//
// marked makes HTML, DOMPurify leaves what is allowed of it, and only then KaTeX and highlight.js
// fill in formulas and code: they write HTML of their own from plain text.

import { marked } from "./vendor/marked/marked.esm.js";
import hljs from "./vendor/highlight/highlight.min.js";
import "./vendor/dompurify/purify.min.js";
import "./vendor/katex/katex.min.js";
import { element } from "./dom.js";

const { DOMPurify, katex } = globalThis;

const TAGS = `a b blockquote br code del details div dd dl dt em h1 h2 h3 h4 h5 h6 hr i kbd li mark
  ol p pre s small span strong sub summary sup table tbody td th thead tr u ul`.split(/\s+/);

const ATTRIBUTES = ["align", "colspan", "href", "rowspan", "start", "title"];

const purifier = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: [...ATTRIBUTES, "class", "data-language"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ADD_URI_SAFE_ATTR: ["align", "colspan", "data-language", "rowspan", "start"], // no addresses
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i, // a relative one would ask this server
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  // The classes below are ours; others could dress text up as a part of the page.
  if (!/^math( display)?$/.test(node.className)) node.removeAttribute("class");
  if (node.tagName === "A") {
    node.target = "_blank";
    node.rel = "noopener noreferrer";
  }
});

const escape = (text) =>
  text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

const ANY_TAG = /<[^>]*>/g;
const VALUE = `(?:"[^"]*"|'[^']*'|[\\w%.-]+)`;
const OUR_TAG = new RegExp(
  `^</?(?:${TAGS.join("|")})(?:\\s+(?:${ATTRIBUTES.join("|")})=${VALUE})*\\s*/?>$`,
  "i",
);
const isOurs = (html) => html.match(ANY_TAG)?.every((tag) => OUR_TAG.test(tag));

function math(name, level, start, rules) {
  return {
    name,
    level,
    start: (source) => source.match(start)?.index,
    tokenizer(source) {
      for (const [rule, display] of rules) {
        const match = rule.exec(source);
        if (match) return { type: name, raw: match[0], text: match[1].trim(), display };
      }
    },
    renderer({ text, display }) {
      const span = `<span class="math${display ? " display" : ""}">${escape(text)}</span>`;
      return level === "block" ? `<p>${span}</p>\n` : span;
    },
  };
}

marked.use({
  gfm: true,
  extensions: [
    math("mathBlock", "block", /(?:^|\n) {0,3}(?:\$\$|\\\[)/, [
      [/^ {0,3}\$\$((?:\\.|[^\\$])+?)\$\$ *(?:\n|$)/s, true],
      [/^ {0,3}\\\[(.+?)\\\] *(?:\n|$)/s, true],
    ]),
    // A dollar that stands before a space or after one, or before a digit, is money.
    math("math", "inline", /\$|\\[([]/, [
      [/^\$\$((?:\\.|[^\\$])+?)\$\$/s, true],
      [/^\$(?![\s$])((?:\\.|[^\\$\n]|\n(?!\n))*?(?:\\.|[^\\$\s]))\$(?!\d)/, false],
      [/^\\\[(.+?)\\\]/s, true],
      [/^\\\((.+?)\\\)/s, false],
    ]),
  ],
  renderer: {
    // HTML that would not be shown is shown as text: nothing of an answer is lost.
    html: ({ text }) => (isOurs(text) ? text : escape(text)),
    // An image would be fetched from another host.
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || "image")}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => {
      const language = (lang ?? "").match(/^\S*/)[0];
      return `<pre data-language="${escape(language)}"><code>${escape(text)}</code></pre>`;
    },
  },
});

function highlight(code, text, language) {
  if (hljs.getLanguage(language)) {
    code.innerHTML = hljs.highlight(text, { language, ignoreIllegals: true }).value;
  } else {
    code.textContent = text;
  }
}

// `html` of marked, safe and complete.
function build(html) {
  const fragment = DOMPurify.sanitize(html, purifier);
  for (const span of fragment.querySelectorAll("span.math")) {
    const displayMode = span.classList.contains("display");
    const text = span.textContent;
    try {
      katex.render(text, span, { displayMode, throwOnError: false, strict: "ignore" });
    } catch {
      span.textContent = text; // nested too deep
    }
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    const language = pre.dataset.language ?? "";
    highlight(code, code.textContent, language);
    const copy = element("button", { type: "button", class: "copy-code" }, "Copy");
    const head = element("div", { class: "code-head" }, element("span", {}, language), copy);
    const box = element("div", { class: "code" }, head);
    pre.replaceWith(box);
    pre.tabIndex = 0; // so that a keyboard can scroll it
    box.append(pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = element("div", { class: "table", tabindex: "0" });
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

// Shows a text that grows at its end. Only its last blocks are read and built again: what came
// before them is settled, so the cost of a reply grows with its length and not with its square.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.settled = 0; // characters
    this.blocks = []; // {type, lang, html, node}
    this.firstOpen = 0; // index of the first block that is not settled
  }

  // Text that is nested too deep for its readers, as of a model that repeats itself, is shown as it is.
  render(text, done) {
    try {
      this.#render(text, done);
    } catch {
      this.clear();
      this.root.append(element("pre", { class: "plain" }, text));
    }
  }

  // `done`: the text is complete. Then all of it is read once more, because a reference may have
  // been defined after its use; blocks that stay the same are left alone.
  #render(text, done) {
    const from = done ? 0 : this.firstOpen;
    const tokens = marked.lexer(done ? text : text.slice(this.settled));
    const blocks = tokens.filter((token) => token.type !== "space");
    blocks.forEach((token, i) => this.#put(from + i, token));
    for (const { node } of this.blocks.splice(from + blocks.length)) node.remove();
    if (!done && blocks.length > 2) this.#settle(text, tokens, blocks.at(-2));
  }

  #settle(text, tokens, firstOpen) {
    const raw = tokens
      .slice(0, tokens.indexOf(firstOpen))
      .map((token) => token.raw)
      .join("");
    if (!text.startsWith(raw, this.settled)) return; // marked changed white space
    this.settled += raw.length;
    this.firstOpen = this.blocks.length - 2;
  }

  #put(index, token) {
    const old = this.blocks[index];
    const html = marked.parser([token]);
    if (html === old?.html) return;
    if (old?.type === "code" && token.type === "code" && old.lang === token.lang) {
      // In place: the block keeps its scroll position and its button the focus.
      const pre = old.node.querySelector("pre");
      highlight(pre.querySelector("code"), token.text, pre.dataset.language);
      old.html = html;
      return;
    }
    const node = element("div", {}, build(html));
    if (old) old.node.replaceWith(node);
    else this.root.append(node);
    this.blocks[index] = { type: token.type, lang: token.lang, html, node };
  }
}
