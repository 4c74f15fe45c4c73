package judge

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/task"
)

// archive is a tar stream of headers; a file's content is its own name.
func archive(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(h.Name))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			io.WriteString(w, h.Name)
		}
	}
	w.Close()
	return b.Bytes()
}

func sift(stream []byte, s *sieve, exclude ...string) (names []string, out []*tar.Header, done Transplanted, err error) {
	var b bytes.Buffer
	if err = s.sift(bytes.NewReader(stream), &b, exclude, &done); err != nil {
		return nil, nil, done, err
	}
	r := tar.NewReader(&b)
	for {
		h, err := r.Next()
		if err == io.EOF {
			return names, out, done, nil
		}
		if err != nil {
			return names, out, done, err
		}
		names, out = append(names, strings.TrimPrefix(h.Name, "./")), append(out, h)
	}
}

func wide() *sieve { return &sieve{entries: 1000, bytes: 1 << 20} }

func TestSiftPassesPlainData(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	stream := archive(t,
		tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755, Uid: 1000},
		tar.Header{Typeflag: tar.TypeDir, Name: "./src/", Mode: 0o755},
		tar.Header{Typeflag: tar.TypeReg, Name: "./src/a", Mode: 0o6755, Uid: 1000, Gid: 1001, ModTime: at, Format: tar.FormatPAX, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "x"}},
		tar.Header{Typeflag: tar.TypeLink, Name: "./src/b", Linkname: "./src/a"},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "./src/c", Linkname: "../src/./a"},
	)
	names, headers, done, err := sift(stream, wide())
	if err != nil || strings.Join(names, " ") != " src/ src/a src/b src/c" {
		t.Fatalf("got %q, %v", names, err)
	}
	a := headers[2]
	if a.Mode != 0o755 || a.Uid != 1000 || a.Gid != 1001 || !a.ModTime.Equal(at) || a.PAXRecords["SCHILY.xattr.security.capability"] != "" {
		t.Errorf("got %+v", a)
	}
	if done.Entries != 5 || done.Bytes != int64(len("./src/a")) || done.LeftOut != 0 {
		t.Errorf("got %+v", done)
	}
}

func TestSiftLeavesOut(t *testing.T) {
	file := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	link := func(name, to string) tar.Header {
		return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
	}
	cases := []struct {
		name    string
		headers []tar.Header
		passes  string
		leftOut int64
	}{
		{"devices", []tar.Header{{Typeflag: tar.TypeChar, Name: "c"}, {Typeflag: tar.TypeBlock, Name: "b"}, {Typeflag: tar.TypeFifo, Name: "f"}, file("x")}, "x", 3},
		{"absolute link", []tar.Header{link("answer", "/tests/expected"), file("x")}, "x", 1},
		{"link that goes up", []tar.Header{link("answer", "../tests/expected")}, "", 1},
		{"link that goes down and up", []tar.Header{link("d/l", "e/../../../tests")}, "", 1},
		{"up through another link", []tar.Header{link("a/b/top", "../.."), link("l", "a/b/top/../tests/x")}, "a/b/top", 1},
		{"hard link to what stays behind", []tar.Header{link("l", "/etc/passwd"), {Typeflag: tar.TypeLink, Name: "h", Linkname: "l"}}, "", 2},
		{"hard link to nothing", []tar.Header{{Typeflag: tar.TypeLink, Name: "h", Linkname: "../../etc/passwd"}}, "", 1},
		{"link as the root", []tar.Header{link(".", "x")}, "", 1},
		{"excluded", []tar.Header{file(".git/hooks/x"), file("a/__pycache__/y"), file("a/z.pyc"), file("a/z.py"), {Typeflag: tar.TypeLink, Name: "h", Linkname: "a/z.pyc"}}, "a/z.py", 1},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			names, _, done, err := sift(archive(t, c.headers...), wide(), workTreeExclude...)
			if err != nil || strings.Join(names, " ") != c.passes || done.LeftOut != c.leftOut {
				t.Errorf("got %q, left %d out, %v", names, done.LeftOut, err)
			}
		})
	}
}

func TestSiftRefuses(t *testing.T) {
	file := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	whole := archive(t, file("some/file"))
	cases := []struct {
		name   string
		stream []byte
		want   error
	}{
		{"no tar", []byte(strings.Repeat("x", 2048)), errNoArchive},
		{"cut off", whole[:515], errNoArchive},
		{"name that goes up", archive(t, file("../x")), errNoArchive},
		{"absolute name", archive(t, file("/etc/passwd")), errNoArchive},
		{"file behind a link", archive(t, tar.Header{Typeflag: tar.TypeSymlink, Name: "d", Linkname: "e"}, file("d/x")), errNoArchive},
		{"too many", archive(t, file("1"), file("2"), file("3"), file("4")), errTooMuch},
		{"too long", archive(t, file(strings.Repeat("x", 90))), errTooMuch},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, _, _, err := sift(c.stream, &sieve{entries: 3, bytes: 80})
			if !errors.Is(err, c.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Whatever goes in, what comes out is a tree of plain data.
func FuzzSift(f *testing.F) {
	f.Add(archive(f, tar.Header{Typeflag: tar.TypeReg, Name: "a"}, tar.Header{Typeflag: tar.TypeSymlink, Name: "b", Linkname: "../a"}))
	f.Add(archive(f, tar.Header{Typeflag: tar.TypeDir, Name: "d/"}, tar.Header{Typeflag: tar.TypeLink, Name: "d/x", Linkname: "a"}))
	f.Fuzz(func(t *testing.T, stream []byte) {
		names, headers, _, err := sift(stream, &sieve{entries: 100, bytes: 1 << 16})
		if err != nil {
			return
		}
		links := map[string]bool{}
		for i, h := range headers {
			name := path.Clean(names[i])
			if path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../") || behind(name, links) {
				t.Errorf("name %q", h.Name)
			}
			if h.Mode&^0o777 != 0 || h.Size > 1<<16 {
				t.Errorf("mode %o, size %d", h.Mode, h.Size)
			}
			switch h.Typeflag {
			case tar.TypeSymlink:
				if !staysInside(name, h.Linkname) {
					t.Errorf("%q leads to %q", name, h.Linkname)
				}
				links[name] = true
			case tar.TypeReg, tar.TypeDir, tar.TypeLink:
				delete(links, name)
			default:
				t.Errorf("type %c", h.Typeflag)
			}
		}
	})
}

// A transplant replaces what is there, and brings only what is declared.
func TestTransplant(t *testing.T) {
	from := &fakeGuest{errs: map[string]error{}, files: map[string]fakeFile{
		"/work": {kind: client.KindDirectory}, "/work/new": {client.KindFile, "n", 0o644, 1000}, "/work/dev": {kind: client.KindOther},
		"/out": {kind: client.KindDirectory}, "/out/a.txt": {client.KindFile, "a", 0o644, 0}, "/out/a.log": {client.KindFile, "l", 0o644, 0},
		"/out/l.txt": {kind: client.KindLink, content: "/etc/shadow"}, "/one": {client.KindFile, "1", 0o4755, 7}, "/secret": {client.KindFile, "s", 0o644, 0},
		"/tree": {kind: client.KindDirectory}, "/tree/.git": {kind: client.KindDirectory}, "/tree/.git/config": {client.KindFile, "evil", 0o644, 0}, "/tree/x": {client.KindFile, "x", 0o644, 0},
	}}
	to := &fakeGuest{errs: map[string]error{}, files: map[string]fakeFile{
		"/work": {kind: client.KindDirectory}, "/work/old": {client.KindFile, "o", 0o644, 0},
		"/tree": {kind: client.KindDirectory}, "/tree/.git": {kind: client.KindDirectory}, "/tree/.git/config": {client.KindFile, "good", 0o644, 0}, "/tree/gone": {client.KindFile, "g", 0o644, 0},
		"/removed": {client.KindFile, "r", 0o644, 0}, "/emptied": {kind: client.KindDirectory}, "/emptied/e": {client.KindFile, "e", 0o644, 0},
		"/kept": {kind: client.KindDirectory}, "/kept/k": {client.KindFile, "k", 0o644, 0}, "/kept/c.pyc": {client.KindFile, "c", 0o644, 0},
	}}
	v := Verifier{Judging: task.Judging{WorkTree: "/tree", Artifacts: []task.Artifact{
		{Source: "/work"}, {Source: "/o*t/*.txt"}, {Source: "/one", Destination: "/two/one"}, {Source: "/removed"}, {Source: "/no*"},
		{Source: "/emptied"}, {Source: "/kept", Exclude: []string{"*.pyc"}},
	}}}
	tr := &transplanter{from: from, to: to, limits: wide()}
	if err := tr.transplant(t.Context(), &v); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/work/new": "n", "/out/a.txt": "a", "/two/one": "1", "/tree/x": "x", "/tree/.git/config": "good",
		"/work/old": "", "/work/dev": "", "/out/a.log": "", "/out/l.txt": "", "/secret": "", "/tree/gone": "", "/removed": "", "/kept/k": "", "/kept/c.pyc": "c",
	} {
		if got := to.files[path].content; got != want {
			t.Errorf("%s is %q, not %q", path, got, want)
		}
	}
	if _, there := to.files["/emptied"]; there {
		t.Error("a directory that the rollout has removed is there")
	}
	if f := to.files["/two/one"]; f.mode != 0o755 || f.uid != 7 {
		t.Errorf("file is %+v", f)
	}
	if d := tr.done; strings.Join(d.Missing, " ") != "/removed /no* /emptied /kept" || d.LeftOut != 2 {
		t.Errorf("got %+v", d)
	}
}

func TestArtifactsBeyondTheLimits(t *testing.T) {
	m := working()
	m.rollout["/work/big"] = fakeFile{client.KindFile, strings.Repeat("x", 2<<20), 0o644, 0}
	v := judgeIt(t, m, request(t, task.Transplant))
	if check(t, "big", v.Outcome, v.Reward, VerifierError, nil); v.Reason != ReasonArtifactsTooLarge {
		t.Errorf("reason %s (%s)", v.Reason, v.Detail)
	}
}
