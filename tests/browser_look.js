// What is wrong with the page as a person sees it, as a list of texts. arguments[0]: the smallest contrast.
const least = arguments[0], wrong = [], page = document.documentElement;
document.querySelectorAll('details').forEach(x => { x.open = true; });
if (page.scrollWidth > page.clientWidth) wrong.push(`it scrolls to the side: ${page.scrollWidth} of ${page.clientWidth}`);

function parts(colour) {
  const found = colour.match(/[\d.]+/g).map(Number);
  return found.length > 3 ? found : [...found, 1];
}
function over(front, back) { return [0, 1, 2].map(i => front[i] * front[3] + back[i] * (1 - front[3])); }
function behind(element) {
  const layers = [];
  for (let x = element; x; x = x.parentElement) {
    const layer = parts(getComputedStyle(x).backgroundColor);
    if (layer[3] > 0) layers.push(layer);
    if (layer[3] === 1) break;
  }
  return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255]);
}
function light(colour) {
  const [r, g, b] = colour.map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(a, b) {
  const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

// Lines of text, without what its scrolling ancestors hide.
const lines = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, text = node.textContent.trim(), parent = node.parentElement;
  if (!text || !parent.checkVisibility()) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  let box = parent;
  while (getComputedStyle(box).display.startsWith('inline')) box = box.parentElement;
  const limits = box.getBoundingClientRect();
  for (const rect of range.getClientRects()) {
    if (rect.right < 0 || rect.width < 1) continue;  // for readers of a screen
    if (rect.right > limits.right + 1 || rect.left < limits.left - 1) wrong.push(`runs out of its box: ${text}`);
    const line = {text, left: rect.left, top: rect.top, right: rect.right, bottom: rect.bottom};
    for (let x = box; x !== document.body && x; x = x.parentElement) {
      const style = getComputedStyle(x);
      if (style.overflowX === 'visible') continue;
      const clip = x.getBoundingClientRect();
      if (style.overflowX === 'hidden' && rect.right > clip.right + 1) wrong.push(`is cut off: ${text}`);
      line.left = Math.max(line.left, clip.left); line.right = Math.min(line.right, clip.right);
      line.top = Math.max(line.top, clip.top); line.bottom = Math.min(line.bottom, clip.bottom);
    }
    if (line.right > line.left && line.bottom > line.top) lines.push(line);
  }
  const found = contrast(over(parts(getComputedStyle(parent).color), behind(parent)), behind(parent));
  if (found < least) wrong.push(`has a contrast of ${found.toFixed(2)}: ${text}`);
}
lines.sort((a, b) => a.top - b.top);
lines.forEach((a, i) => {
  for (let j = i + 1; j < lines.length && lines[j].top < a.bottom - 2; j++) {
    const b = lines[j], wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    if (wide > 1 && Math.min(a.bottom, b.bottom) - b.top > 2) wrong.push(`overlap: ${a.text} / ${b.text}`);
  }
});
if (lines.length < 10) wrong.push('almost nothing is shown');
return [...new Set(wrong)].map(x => x.slice(0, 200));
