package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Firecracker is asked by its public API, in the order in which it wants it.
func TestFirecrackerRequests(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "api.sock"))
	if err != nil {
		t.Fatal(err)
	}
	var asked []string
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || !json.Valid(body) {
			t.Errorf("%s %s: body %q (%v)", r.Method, r.URL.Path, body, err)
		}
		asked = append(asked, r.Method+" "+r.URL.Path)
		if r.URL.Path == "/snapshot/create" {
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, `{"fault_message":"no room"}`)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})}
	go server.Serve(l)
	defer server.Close()

	f := &firecracker{}
	if err := f.start(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	if err := f.save(t.Context(), dir, "saved"); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("a refusal became %v", err)
	}
	if err := f.start(t.Context(), dir, "saved"); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"PUT /machine-config", "PUT /boot-source", "PUT /drives/root", "PUT /vsock", "PUT /entropy", "PUT /actions",
		"PATCH /vm", "PUT /snapshot/create", "PUT /snapshot/load",
	}
	if !slices.Equal(asked, want) {
		t.Errorf("asked\n%q, not\n%q", asked, want)
	}
}

// Answers of QEMU's protocol are told from its events.
func TestQMP(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qmp.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprint(c, `{"QMP": {"version": {}}}`)
		in := json.NewDecoder(c)
		for _, answer := range []string{
			`{"return": {}}`,
			`{"event": "STOP"} {"return": {"status": "completed"}}`,
			`{"error": {"class": "GenericError", "desc": "not now"}}`,
		} {
			var request map[string]any
			if in.Decode(&request) != nil {
				return
			}
			fmt.Fprint(c, answer)
		}
	}()
	m, err := dialQMP(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	answer, err := m.call("query-migrate", nil)
	if err != nil || !strings.Contains(string(answer), "completed") {
		t.Errorf("answer %s, %v", answer, err)
	}
	if _, err := m.call("stop", nil); err == nil || !strings.Contains(err.Error(), "not now") {
		t.Errorf("a refusal became %v", err)
	}
}
