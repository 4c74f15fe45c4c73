package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/agent/proto"
)

const passwd = `root:x:0:0:root:/root:/bin/bash
# comment
broken line
bad:x:one:two:::
dev:x:1000:1000:Dev,,,:/home/dev:/bin/sh
nohome:x:1001:1001:::
1000:x:7:7:a name that looks like a number:/seven:/bin/sh
`

const group = `root:x:0:
dev:x:1000:
docker:x:100:dev,other
sudo:x:27:other,dev
deviant:x:28:deviant
cut:x
`

func TestResolveAccount(t *testing.T) {
	tests := []struct {
		spec string
		want account
		err  bool
	}{
		{"root", account{name: "root", home: "/root"}, false},
		{"dev", account{"dev", "/home/dev", 1000, 1000, []uint32{100, 27}}, false},
		{"dev:sudo", account{"dev", "/home/dev", 1000, 27, nil}, false},
		{"dev:12", account{"dev", "/home/dev", 1000, 12, nil}, false},
		{"1001", account{"nohome", "/", 1001, 1001, nil}, false},
		{"1000", account{"1000", "/seven", 7, 7, nil}, false},
		{"4242", account{home: "/", uid: 4242}, false},
		{"4242:4343", account{home: "/", uid: 4242, gid: 4343}, false},
		{"bad", account{}, true},
		{"nobody", account{}, true},
		{"dev:", account{}, true},
		{"dev:nogroup", account{}, true},
		{":", account{}, true},
		{"-1", account{}, true},
		{"4294967295", account{}, true},
	}
	for _, tt := range tests {
		a, err := resolveAccount(tt.spec, strings.NewReader(passwd), strings.NewReader(group))
		if tt.err {
			if !errors.Is(err, &proto.Error{Code: proto.CodeUserNotFound}) {
				t.Errorf("%q: got %+v, %v, want user_not_found", tt.spec, a, err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(a, tt.want) {
			t.Errorf("%q: got %+v, %v, want %+v", tt.spec, a, err, tt.want)
		}
	}
}

func FuzzResolveAccount(f *testing.F) {
	f.Add("dev:sudo", passwd, group)
	f.Add(":", ":::::\n", ":::")
	f.Fuzz(func(t *testing.T, spec, passwd, group string) {
		a, err := resolveAccount(spec, strings.NewReader(passwd), strings.NewReader(group))
		if err == nil && (a.uid == 1<<32-1 || a.gid == 1<<32-1) {
			t.Fatalf("%q resolves to %+v", spec, a)
		}
	})
}

func TestCgroupMount(t *testing.T) {
	const info = "25 1 0:22 / /sys rw - sysfs sysfs rw\n31 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
	if dir, ok := cgroupMount([]byte(info)); !ok || dir != "/sys/fs/cgroup" {
		t.Errorf("got %q, %v", dir, ok)
	}
	if dir, ok := cgroupMount([]byte("1 2 3 - cgroup2\n\n - cgroup2 x\n")); ok {
		t.Errorf("got %q from nonsense", dir)
	}
}

// A file in the state directory is mounted over the machine id once, whatever
// leads to it, and then overwritten.
func TestSetMachineID(t *testing.T) {
	dir := t.TempDir()
	mounts := 0
	m := machine{filepath.Join(dir, "state"), func(source, target string) error {
		mounts++
		return errors.Join(os.Remove(target), os.Link(source, target)) // the same file under both names, as a mount has it
	}}
	path, link := filepath.Join(dir, "machine-id"), filepath.Join(dir, "link")
	if err := m.setMachineID(path, "a"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v without a machine id, want not exist", err)
	}
	os.WriteFile(path, []byte("old\n"), 0o644)
	os.Symlink(path, link)
	for _, c := range []struct{ path, id string }{{path, "one"}, {path, "two"}, {link, "six"}} {
		if mounts > 0 {
			os.WriteFile(path, []byte("something longer of the guest's own"), 0o644)
		}
		if err := m.setMachineID(c.path, c.id); err != nil {
			t.Fatal(err)
		}
		if b, _ := os.ReadFile(path); string(b) != c.id+"\n" {
			t.Errorf("machine id %q, want %q", b, c.id)
		}
	}
	if mounts != 1 {
		t.Errorf("%d mounts", mounts)
	}
}

// fill writes n bytes to a log as its pump does.
func fill(l *streamLog, n int) {
	frame := make([]byte, proto.HeaderSize+chunkSize)
	for n > 0 {
		k := l.room(min(n, chunkSize))
		l.take(frame[:proto.HeaderSize+k])
		n -= k
	}
}

// All logs together are bounded: those of ended commands make room, oldest first,
// and then each has only little.
func TestLogsAreBoundedTogether(t *testing.T) {
	var all logs
	kept := func(l *streamLog) int64 { s := l.status(); return s.Bytes - s.KeptFrom }
	var list []*streamLog
	for range maxLogs / maxLog {
		l := newStreamLog(&all)
		fill(l, 2*maxLog)
		list = append(list, l)
	}
	for i, l := range list {
		if kept(l) <= maxLog-2*logChunk || kept(l) > maxLog {
			t.Errorf("log %d keeps %d bytes", i, kept(l))
		}
	}
	list[3].end()
	list[5].end()
	reader := list[3].reader(0, true)
	more := newStreamLog(&all)
	fill(more, 2*maxLog)
	if kept(list[5]) != 0 || kept(list[3]) == 0 || kept(more) < maxLog-2*logChunk {
		t.Errorf("kept: the log that is read %d, the other ended one %d, the new one %d", kept(list[3]), kept(list[5]), kept(more))
	}
	late := newStreamLog(&all)
	fill(late, 2*maxLog)
	if kept(late) == 0 || kept(late) > maxLog/4 {
		t.Errorf("the last log keeps %d bytes", kept(late))
	}
	reader.leave()
	if !all.forget(list...) || !all.forget(more, late) || all.taken != 0 || len(all.ended) != 0 {
		t.Errorf("%d chunks and %d logs left", all.taken, len(all.ended))
	}
}

func TestOperationsForgetTheOldest(t *testing.T) {
	var o operations
	for i := range maxKnownOperations + 1 {
		if !o.add(string(rune(i + 1))) {
			t.Fatalf("id %d is known", i)
		}
	}
	if o.add(string(rune(2))) || !o.add(string(rune(1))) {
		t.Error("the oldest id is kept, or a newer one was dropped")
	}
	if len(o.order) != maxKnownOperations || len(o.known) != maxKnownOperations {
		t.Errorf("%d and %d ids are kept", len(o.order), len(o.known))
	}
}

func TestParseStat(t *testing.T) {
	const line = "71 (a) b (c)) S 1 71 71 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0"
	s, err := parseStat([]byte(line))
	if err != nil || s != (stat{name: "a) b (c)", state: 'S', parent: 1, flags: 4194560, start: 4711}) {
		t.Errorf("got %+v, %v", s, err)
	}
	for _, bad := range []string{"", "1 (a", ") (", "1 (a) S 1", strings.Replace(line, " 4711 ", " x ", 1)} {
		if s, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q is %+v", bad, s)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("71 (a) b (c)) S 1 71 71 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0"))
	f.Fuzz(func(t *testing.T, b []byte) { _, _ = parseStat(b) })
}

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{"/a": "/a", `/a\040b\134`: `/a b\`, `/a\04`: `/a\04`, `\999`: `\999`} {
		if got := unescape(in); got != want {
			t.Errorf("%q is %q, not %q", in, got, want)
		}
	}
}
