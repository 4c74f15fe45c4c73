package output

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

type item struct {
	ID   string `json:"id"`
	Size int64  `json:"size_bytes"`
}

func items() List[item] {
	return List[item]{
		Header: []string{"ID", "SIZE"},
		Row:    func(i item) []string { return []string{i.ID, Size(i.Size)} },
		Name:   func(i item) string { return i.ID },
		Items:  []item{{"a<b", 1 << 20}, {"", 3}, {"x\x1b[2J", 0}},
	}
}

func TestListFormats(t *testing.T) {
	cases := []struct {
		format Format
		want   string
	}{
		{Table, "ID       SIZE\na<b      1 MiB\n-        3 B\nx^[[2J   0 B\n"},
		{JSONL, `{"id":"a<b","size_bytes":1048576}` + "\n" + `{"id":"","size_bytes":3}` + "\n" + `{"id":"x\u001b[2J","size_bytes":0}` + "\n"},
		{Name, "a<b\n\nx\x1b[2J\n"},
	}
	for _, c := range cases {
		var b bytes.Buffer
		if err := items().Write(&b, c.format); err != nil {
			t.Fatal(err)
		}
		if b.String() != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", c.format, b.String(), c.want)
		}
	}
	var b bytes.Buffer
	if err := (List[item]{}).Write(&b, JSON); err != nil || b.String() != "[]\n" {
		t.Errorf("empty list: %q, %v", b.String(), err)
	}
}

func TestTemplate(t *testing.T) {
	for text, want := range map[string]string{
		"{{json .}}":             `{"id":"a<b","size_bytes":1048576}`,
		"{{.ID}} {{size .Size}}": "a<b 1 MiB",
		"{{json .ID}}":           `"a<b"`,
	} {
		var b bytes.Buffer
		l := items()
		l.Items = l.Items[:1]
		if err := l.WriteTemplate(&b, text); err != nil {
			t.Fatal(err)
		}
		if b.String() != want+"\n" {
			t.Errorf("%s: got %q, want %q", text, b.String(), want)
		}
	}
	for _, text := range []string{"{{", "{{.Nothing}}"} {
		if err := items().WriteTemplate(&bytes.Buffer{}, text); err == nil || !strings.HasPrefix(err.Error(), "format:") {
			t.Errorf("%s: error %v", text, err)
		}
	}
}

func TestParseSize(t *testing.T) {
	good := map[string]uint64{
		"0": 0, "4096": 4096, "1K": 1024, "512M": 512 << 20, "512m": 512 << 20, "6G": 6 << 30, "1T": 1 << 40,
		"6GiB": 6 << 30, "6GB": 6 << 30, "6 G": 6 << 30, "100B": 100, "1.5G": 3 << 29, "0.5k": 512, "7E": 7 << 60,
	}
	for text, want := range good {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "G", "-1", "+1", "1e9", "0x10", "1.5", "8E", "99999999999999999999", "1.0001K", "inf", "NaN", "1 2", "12iB", "1Q", ".", "99999999999999999999.0"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q: %d, want an error", text, got)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"6G", "1.5g", "", "99999999999999999999T", "1e3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := ParseSize(s); err == nil && n > 1<<63 {
			t.Errorf("%q: %d is beyond what a size can be", s, n)
		}
	})
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1<<20 - 1: "1 MiB", 6 << 30: "6 GiB", 1 << 62: "4 EiB",
	} {
		if got := Size(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestAge(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0 seconds ago", time.Second: "1 second ago", 90 * time.Second: "1 minute ago",
		5 * time.Hour: "5 hours ago", 50 * time.Hour: "2 days ago",
	} {
		if got := Age(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}

func TestVisible(t *testing.T) {
	cases := []struct{ name, in, want string }{
		{"plain", "boot\tok\n", "boot\tok\n"},
		{"escape sequence", "\x1b[2Jgone\x07", "^[[2Jgone^G"},
		{"serial line end", "a\r\nb\r\n", "a\nb\n"},
		{"lone return overwrites", "good\rbad", "good^Mbad"},
		{"umlaut passes", "grün → ok", "grün → ok"},
		{"no UTF-8", "a\xff\xc3", `a\xff\xc3`},
		{"C1 control", "\u009b31m", "<U+009B>31m"},
		{"direction override", "\u202eabc", "<U+202E>abc"},
		{"delete", "\x7f", "^?"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			// However it is split, the result is the same.
			for step := 1; step <= len(c.in); step++ {
				var b bytes.Buffer
				w := NewVisibleWriter(&b)
				for p := []byte(c.in); len(p) > 0; {
					n := min(step, len(p))
					if _, err := w.Write(p[:n]); err != nil {
						t.Fatal(err)
					}
					p = p[n:]
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				if b.String() != c.want {
					t.Fatalf("in steps of %d: %q, want %q", step, b.String(), c.want)
				}
			}
		})
	}
	if got := Visible("one\ntwo\t3"); got != "one^Jtwo 3" {
		t.Errorf("line: %q", got)
	}
}

// FuzzVisible: nothing that steers a terminal comes out, whatever goes in.
func FuzzVisible(f *testing.F) {
	f.Add([]byte("\x1b]0;title\x07\xc2\x9b31m\r\n"), 2)
	f.Fuzz(func(t *testing.T, in []byte, cut int) {
		var b bytes.Buffer
		w := NewVisibleWriter(&b)
		cut = min(max(cut, 0), len(in))
		w.Write(in[:cut])
		w.Write(in[cut:])
		w.Close()
		for _, r := range b.String() {
			if r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 {
				t.Fatalf("%q became %q", in, b.String())
			}
		}
	})
}
