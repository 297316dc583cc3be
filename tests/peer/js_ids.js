// tests/peer/js_ids.js - compares our token ids with a JavaScript port of the Hugging Face tokenizer.
//
// usage: node js_ids.js MODULES_DIR TOKENIZER_DIR < IDS.jsonl     (lines of `peer LIBS ids`)
//
// Left out are texts that NFC changes (that tokenizer normalises, GGUF tokenizers do not) and texts with the three
// characters for which JavaScript's \s differs from Unicode's white space.
"use strict";
const fs = require("fs");
const path = require("path");
const { TokenizerLoader } = require(path.resolve(process.argv[2], "@lenml/tokenizers"));

const read = (name) => JSON.parse(fs.readFileSync(path.join(process.argv[3], name), "utf8"));
const tokenizer = TokenizerLoader.fromPreTrained({
    tokenizerJSON: read("tokenizer.json"),
    tokenizerConfig: read("tokenizer_config.json"),
});

let compared = 0, left_out = 0, different = 0;
for (const line of fs.readFileSync(0, "utf8").split("\n")) {
    if (!line) continue;
    const { text, ids } = JSON.parse(line);
    if (text.normalize("NFC") !== text || /[\u0085\u180e\ufeff]/.test(text)) {
        left_out++;
        continue;
    }
    compared++;
    const theirs = tokenizer.encode(text, { add_special_tokens: false });
    if (theirs.length !== ids.length || theirs.some((id, i) => id !== ids[i])) {
        if (different++ < 5) console.error(`  ${JSON.stringify(text)}\n  ours   ${ids}\n  theirs ${theirs}`);
    }
}
const good = compared > 0 && different === 0;
const verdict = good ? "ok" : "FAIL";
console.log(`${verdict} token ids of ${compared} strings equal the JavaScript tokenizer's (${left_out} left out)`);
process.exit(good ? 0 : 1);
