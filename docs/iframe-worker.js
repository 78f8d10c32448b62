// Pages that are opened as files may not start workers, so the search of the site runs in a hidden frame there.
// The theme's plugin `offline` asks for a script of this name; the one it would take itself comes from a network.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      frame.contentDocument.open(); // what is written by hand is not replaced by an empty page a moment later
      frame.contentDocument.write("<!doctype html><body>");
      frame.contentDocument.close();
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, location).href;
      this.isLoaded = new Promise((resolve) => script.addEventListener("load", resolve));
      frame.contentDocument.body.append(script);
    }
    postMessage(data) {
      this.isLoaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
