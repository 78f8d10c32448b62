// Parts of the timeline: lanes, ages and hatching.

// Assign each span to the first free lane. Returns [{from, to, version, request, lane}] by start.
function assignLanes(track) {
  const { t, d, v, r } = track.spans;
  const ends = [];
  return t.map((from, i) => {
    let lane = ends.findIndex((end) => end <= from);
    if (lane < 0) lane = ends.length;
    ends[lane] = from + d[i];
    return { from, to: from + d[i], version: v[i], request: r[i], lane };
  });
}

// The newest version at a time (ms), by when each was published.
function newestAt(published, time) {
  let [low, high] = [0, published.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (published[middle] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// A hatched pattern, for waits.
function hatch(pen, line, background) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.fillStyle = background;
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = line;
  brush.globalAlpha = 0.7;
  brush.beginPath();
  for (const at of [-8, 0, 8]) { brush.moveTo(at, 8); brush.lineTo(at + 8, 0); }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}
