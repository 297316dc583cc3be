#!/usr/bin/env bash
# The pages of spk-compare --html and spk-pack --report: whole or absent, the figures of --json, nothing from elsewhere, whatever
# stands in names and tokens; and, where there is a Chromium, that they fit a wide window and a telephone's.
set -u
# shellcheck source=tests/check.sh
. tests/check.sh
text=tests/text/held-out.txt
: >"$dir/out"; : >"$dir/err"

compare() { "$SPK_BIN/spk-compare" "$@" >"$dir/out" 2>"$dir/err"; rc=$?; }
pack() { "$SPK_BIN/spk-pack" --quiet "$@" >"$dir/out" 2>"$dir/err"; rc=$?; }
says() { grep -qF -- "$1" "$dir/out" "$dir/err"; }
has() { grep -qF -- "$2" "$dir/$1"; }
one_line() { [ "$(wc -l <"$dir/err")" = 1 ]; }
no_leftovers() { [ -z "$(find "$dir" -mindepth 1 -name '.*')" ]; }
whole() { [ "$(head -n 1 "$dir/$1")" = '<!DOCTYPE html>' ] && [ "$(tail -n 1 "$dir/$1")" = '</html>' ]; }
# Every number of a JSON file is in the page, as exactly as there.
has_figures() {
    local value
    sed -nE 's/^.*":[[:space:]]*(-?[0-9][0-9.eE+-]*),?$/\1/p' "$dir/$2" | sort -u >"$dir/values"
    [ "$(wc -l <"$dir/values")" -ge "$3" ] || return 1
    while read -r value; do has "$1" "<data value=\"$value\">" || { echo "no $value" >>"$dir/err"; return 1; }; done <"$dir/values"
}
# No scripts, no addresses, nothing to load.
alone() { ! grep -qiE 'https?:|src=|href=|url\(|@import|<(script|link|iframe|object|embed|img|base)|[[:space:]]on[a-z]+=' "$dir/$1"; }

# ---- The two pages ----
pack --recipe fast --json --report "$dir/pack.html" $model "$dir/fast.spk"
cp "$dir/out" "$dir/pack.json"
check "spk-pack writes a page" '[ $rc -eq 0 ] && whole pack.html && no_leftovers'
check "with the figures of --json" 'has_figures pack.html pack.json 100'
check "and nothing from elsewhere" 'alone pack.html'
check "a map of errors, with a legend" 'has pack.html "layer 7, routed down: 6." && has pack.html "Colour scale: " && has pack.html "as in the source"'
check "sizes and provenance" 'has pack.html "read per token" && has pack.html ">tiny-qwen36-ud-q4_k_m.gguf<" && has pack.html ">spk-pack " &&
    has pack.html "$("$SPK_BIN/spk-info" "$dir/fast.spk" | grep -oE "[0-9a-f]{32}" | head -n 1)"'

compare --text $text --ctx 64 --max-tokens 700 --json "$dir/compare.json" --html "$dir/compare.html" $model "$dir/fast.spk" $model
check "spk-compare writes a page" '[ $rc -eq 0 ] && whole compare.html && no_leftovers'
check "with the figures of --json" 'has_figures compare.html compare.json 25'
check "and nothing from elsewhere" 'alone compare.html'
check "KL by position, its distribution, the map, both perplexities" 'has compare.html "KL along the text" && has compare.html "by place in the window" &&
    has compare.html "Distribution of KL" && has compare.html "routed down: 6." && has compare.html "perplexity, base<b>" && has compare.html "perplexity, candidate<b>"'
check "worst tokens in their text" '[ "$(grep -c "<mark><bdi>" "$dir/compare.html")" = 20 ] && grep -q "<bdi>[^<]*[a-z] [a-z]*[^<]*</bdi><mark>" "$dir/compare.html"'
check "a model that equals the base has no pictures of zeros" 'has compare.html "Every KL is zero" && has compare.html "no map of errors"'
cp "$dir/compare.html" "$dir/first.html"
compare --text $text --ctx 64 --max-tokens 700 --threads 1 --force --html "$dir/compare.html" $model "$dir/fast.spk" $model
check "the same page for any number of threads" 'cmp -s "$dir/first.html" "$dir/compare.html"'
check "every picture has a title" '[ "$(grep -o "<svg role=\"img\"" "$dir/compare.html" | wc -l)" = "$(grep -o "<svg role=\"img\"[^>]*><title>[^<]" "$dir/compare.html" | wc -l)" ]'

pack --recipe native --report "$dir/native.html" $model "$dir/native.spk"
check "a native pack has no errors to show" '[ $rc -eq 0 ] && whole native.html && has native.html "Nothing was requantized"'

# ---- Names and tokens that would be markup ----
name="$(printf '<img src=x onerror=alert(1)>&"\047\351\033\342\200\256.gguf')"
# The commonest token becomes one of markup and of a byte that is no UTF-8; only in the list of tokens, where its length is.
LC_ALL=C sed 's/\x05\x00\x00\x00\x00\x00\x00\x00\xc4\xa0the/\x05\x00\x00\x00\x00\x00\x00\x00<b>\xc3\xbf/' $model >"$dir/$name"
"$SPK_BIN/spk-run" --tokenize --prompt-file $text $model 2>"$dir/err" | tr ' ' '\n' | head -n 700 >"$dir/tokens"
pack --recipe safe --report "$dir/hostile-pack.html" "$dir/$name" "$dir/$name.spk"
check "hostile names are packed" '[ $rc -eq 0 ] && whole hostile-pack.html'
compare --tokens "$dir/tokens" --html "$dir/hostile.html" "$dir/$name" "$dir/$name.spk"
check "and compared" '[ $rc -eq 0 ] && whole hostile.html'
for page in hostile hostile-pack; do
    check "$page: names are text" '! grep -qi "<img" "$dir/$page.html" && has $page.html "&lt;img src=x onerror=alert(1)&gt;&amp;&quot;&#39;"'
    check "$page: is UTF-8 without control or direction characters" 'iconv -f UTF-8 -t UTF-8 "$dir/$page.html" >/dev/null && ! LC_ALL=C grep -qP "[\x00-\x08\x0b-\x1f]|\xe2\x80\xae" "$dir/$page.html"'
done
check "tokens are text" '! grep -q "<b>$(printf "\357\277\275")" "$dir/hostile.html" && has hostile.html "&lt;b&gt;$(printf "\357\277\275")"'

# ---- Whole or absent ----
compare --text $text --html "$dir/nowhere/page" "$dir/no.gguf" "$dir/no.gguf"
check "a page that cannot be written is found before anything else" '[ $rc -eq 1 ] && one_line && says "nowhere/page"'
pack --report "$dir/nowhere/page" $model "$dir/never.spk"
check "by spk-pack too" '[ $rc -eq 1 ] && one_line && says "nowhere/page" && [ ! -e "$dir/never.spk" ]'
(ulimit -f 0; "$SPK_BIN/spk-compare" --text $text --max-tokens 50 --max-kl 0 --html "$dir/lost" $model $model 2>&1; echo "rc $?") | cat >"$dir/out"
check "gates are printed whatever becomes of the page" 'says "passed --max-kl 0" && says "lost" && says "rc 1" && [ ! -e "$dir/lost" ] && no_leftovers'
echo keep >"$dir/page"
compare --text $text --force --html "$dir/page" $model "$dir/no.gguf"
check "a failure leaves an old page" '[ $rc -eq 1 ] && [ "$(cat "$dir/page")" = keep ] && no_leftovers'
pack --force --report "$dir/page" "$dir/no.gguf" "$dir/fast.spk"
check "of spk-pack too" '[ $rc -eq 1 ] && says "no.gguf" && [ "$(cat "$dir/page")" = keep ] && no_leftovers'
pack --report "$dir/page" $model "$dir/never.spk"
check "which is not replaced without --force, before anything else" '[ $rc -eq 1 ] && one_line && says "page: exists already" && [ "$(cat "$dir/page")" = keep ] && [ ! -e "$dir/never.spk" ] && no_leftovers'
compare --text $text --html "$dir/page" "$dir/no.gguf" "$dir/no.gguf"
check "by spk-compare neither" '[ $rc -eq 1 ] && one_line && says "page: exists already" && [ "$(cat "$dir/page")" = keep ]'
pack --dry-run --report "$dir/page" $model
check "a dry run has no page" '[ $rc -eq 2 ] && says "dry-run" && [ "$(cat "$dir/page")" = keep ]'

# ---- Never in the place of an input or of another output ----
cp $model "$dir/model.gguf"
pack --report "$dir/model.gguf" "$dir/model.gguf" "$dir/never.spk"
check "the source is not replaced" '[ $rc -eq 1 ] && says "that is the input" && cmp -s $model "$dir/model.gguf"'
pack --report "$dir/never.spk" $model "$dir/never.spk"
check "the page is not the pack" '[ $rc -eq 1 ] && says "that is the pack" && [ ! -e "$dir/never.spk" ]'
pack --report "$dir/./twice.spk" $model "$dir/twice.spk"
check "by no other name" '[ $rc -eq 1 ] && says "twice.spk: is being written already" && [ ! -e "$dir/twice.spk" ] && no_leftovers'
compare --text $text --html "$dir/model.gguf" $model "$dir/model.gguf"
check "a model is not replaced" '[ $rc -eq 1 ] && says "that is the input" && cmp -s $model "$dir/model.gguf"'
cp $text "$dir/text"
compare --text "$dir/text" --html "$dir/text" $model $model
check "nor is the text" '[ $rc -eq 1 ] && says "that is the input" && cmp -s $text "$dir/text"'
compare --text $text --html "$dir/both" --json "$dir/both" $model $model
check "one file for two outputs" '[ $rc -eq 2 ] && says "--json and --html" && [ ! -e "$dir/both" ]'

# ---- In a browser ----
if ! command -v chromium >/dev/null; then
    echo "SKIP pages in a browser: no chromium (Debian package chromium)"
    exit $status
fi
browse() {
    HOME=$dir timeout 60 chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files \
        --user-data-dir="$dir/chrome" --virtual-time-budget=2000 "$@" 2>/dev/null
}
# measure PAGE WIDTH: the page in a frame of that width, beside a script of the test's that says how much wider than its frame the page is,
# which texts of pictures lie outside their picture, and how small the smallest letters are.
measure() {
    cat >"$dir/harness.html" <<HTML
<!DOCTYPE html><body style="margin:0"><iframe src="$1" style="width:$2px;height:844px;border:0"></iframe><script>
document.querySelector("iframe").onload = e => {
  const d = e.target.contentDocument, texts = [...d.querySelectorAll("svg text")];
  d.querySelectorAll("details").forEach(x => x.open = true);
  const outside = texts.filter(t => { const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 2; });
  const sizes = texts.map(t => parseFloat(e.target.contentWindow.getComputedStyle(t).fontSize) * Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b));
  const p = document.createElement("p");
  p.textContent = "overflow " + (d.documentElement.scrollWidth - d.documentElement.clientWidth) + ", outside " + outside.length +
    ", letters " + (sizes.length == 0 || Math.min(...sizes) >= 9 ? "legible" : Math.min(...sizes)) + "; " + outside.map(t => t.textContent).join(" | ");
  document.body.append(p);
};
</script></body>
HTML
    browse --window-size=1400,900 --dump-dom "file://$dir/harness.html" | grep -o '<p>[^<]*' >"$dir/out"
}
"$SPK_TEST_BIN/test_html" "$dir/charts.html"
for page in pack compare charts hostile; do
    for size in 1280,900 390,844; do
        measure $page.html "${size%,*}"
        check "$page fits a window of $size, in legible letters" 'says "overflow 0, outside 0, letters legible"'
        browse --window-size=$size --screenshot="$dir/$page.png" "file://$dir/$page.html" >"$dir/out"
        check "and is drawn" '[ "$(head -c 4 "$dir/$page.png" | tail -c 3)" = PNG ] && [ "$(stat -c %s "$dir/$page.png")" -gt 10000 ]'
    done
done
exit $status
