/* The difference of two texts, by words (after Myers, "An O(ND) difference algorithm", 1986). */

const MOST_EDITS = 1500;

/** Return [kind, text] pairs: "same", "left" (only in the first text) or "right" (only in the second one). */
export function difference(left, right) {
  const [a, b] = [words(left), words(right)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = edits(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return joined([["same", a.slice(0, start).join("")], ...middle, ["same", a.slice(a.length - end).join("")]]);
}

function words(text) {
  return text.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? [];
}

/** Return the shortest edits. Texts that differ in too many places are replaced as a whole. */
function edits(a, b) {
  const whole = () => [["left", a.join("")], ["right", b.join("")]];
  if (!a.length || !b.length) return whole();
  const limit = Math.min(a.length + b.length, MOST_EDITS);
  const furthest = new Map([[1, 0]]); // furthest place in `a` on each diagonal
  const trace = [];
  for (let depth = 0; depth <= limit; depth += 1) {
    trace.push(new Map(furthest));
    for (let k = -depth; k <= depth; k += 2) {
      const down = k === -depth || (k !== depth && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
      let x = down ? furthest.get(k + 1) : furthest.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      furthest.set(k, x);
      if (x >= a.length && x - k >= b.length) return path(trace, a, b);
    }
  }
  return whole();
}

/** Walk back from the ends of both texts. */
function path(trace, a, b) {
  const found = [];
  let [x, y] = [a.length, b.length];
  for (let depth = trace.length - 1; depth >= 0; depth -= 1) {
    const furthest = trace[depth];
    const k = x - y;
    const down = k === -depth || (k !== depth && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
    const beforeX = depth === 0 ? 0 : furthest.get(down ? k + 1 : k - 1);
    const beforeY = depth === 0 ? 0 : beforeX - (down ? k + 1 : k - 1);
    while (x > beforeX && y > beforeY) {
      found.push(["same", a[x - 1]]);
      x -= 1;
      y -= 1;
    }
    if (depth === 0) break;
    if (down) found.push(["right", b[y - 1]]);
    else found.push(["left", a[x - 1]]);
    [x, y] = [beforeX, beforeY];
  }
  return found.reverse();
}

/** Join neighbours of one kind. */
function joined(parts) {
  const found = [];
  for (const [kind, text] of parts) {
    if (!text) continue;
    if (found.at(-1)?.[0] === kind) found.at(-1)[1] += text;
    else found.push([kind, text]);
  }
  return found;
}
