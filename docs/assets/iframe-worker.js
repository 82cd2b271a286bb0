// Search without a server: browsers forbid workers on pages that are opened from disk. There this
// class takes the place of Worker and runs the search in a hidden frame. Nothing is fetched.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write("<!doctype html><body></body>");
      page.close();
      const inside = this.frame.contentWindow;
      const base = new URL(url, location.href);
      const load = (address) =>
        new Promise((done, failed) => {
          const script = page.createElement("script");
          script.src = new URL(address, base);
          script.onload = done;
          script.onerror = failed;
          page.body.appendChild(script);
        });
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
      };
      inside.importScripts = (...addresses) =>
        addresses.reduce((previous, next) => previous.then(() => load(next)), Promise.resolve());
      load(base).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (!this.ready) {
        this.waiting.push(data);
        return;
      }
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
