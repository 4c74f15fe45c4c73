package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
)

// survey returns the processes of a guest.
func survey(t *testing.T, g *guest) client.Survey {
	t.Helper()
	s, err := g.Survey(t.Context(), client.Look{Processes: true})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func quiesce(t *testing.T, g *guest, q client.Quiescence) client.Quieted {
	t.Helper()
	if q.Timeout == 0 {
		q.Timeout = time.Minute
	}
	r, err := g.Quiesce(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// has says whether a process with this argument is there.
func has(s client.Survey, arg string) bool {
	for _, p := range s.Processes {
		for _, a := range p.Args {
			if string(a) == arg {
				return true
			}
		}
	}
	return false
}

// until waits for what a script does in the background.
func (g *guest) until(t *testing.T, arg string) {
	t.Helper()
	eventually(t, "process with the argument "+arg, func() bool { return has(survey(t, g), arg) })
}

func TestSurvey(t *testing.T) {
	g := startInit(t)
	g.sh(t, "echo content > file; ln -s file link; sleep 1111 </dev/null >/dev/null 2>&1 &")
	g.until(t, "1111")
	path := func(name string) string { return filepath.Join(g.dir, name) }
	s, err := g.Survey(t.Context(), client.Look{
		Processes: true, Files: []string{path("link"), path("none"), g.dir}, Contents: []string{path("file"), "/proc/sys/kernel/core_pattern"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.Self.PID != 1 || s.Self.Start == 0 || s.Self.Inode == 0 {
		t.Errorf("the agent is %+v", s.Self)
	}
	if len(s.Files) != 4 || s.Files[0].Kind != "file" || s.Files[0].Inode != s.Files[2].Inode || s.Files[0].ChangedNS == 0 ||
		s.Files[1].Kind != "directory" || string(s.Files[2].Content) != "content\n" || s.Files[0].Content != nil || len(s.Files[3].Content) == 0 {
		t.Errorf("files are %+v", s.Files)
	}
	for _, p := range s.Processes {
		if p.PID > 1 && (p.Start < s.Self.Start || p.Program == "" || p.Inode == 0 || p.Name == "") {
			t.Errorf("process %+v", p)
		}
	}
}

// A search lists what is there, once for each directory, and a quiet guest is looked at
// in the same request.
func TestSurveySearches(t *testing.T) {
	g := startInit(t)
	g.sh(t, "mkdir bin sbin; echo a > bin/sh; echo b > bin/other; echo c > sbin/cat; ln -s bin also; ln -s nowhere bin/dangling; echo yes > verdict; ln -s verdict link")
	path := func(name string) string { return filepath.Join(g.dir, name) }
	look := client.Look{
		Searches: []client.Search{{
			Directories: []string{path("bin"), path("none"), path("also"), path("sbin"), path("verdict")}, Names: []string{"sh", "cat", "dangling"},
		}},
		Exact: []string{path("verdict"), path("link"), path("missing")},
		Tree:  path("sbin"),
	}
	s, err := g.Survey(t.Context(), look)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range s.Files {
		got = append(got, strings.TrimPrefix(string(f.Path), g.dir+"/")+" "+f.Kind+" "+strings.TrimSpace(string(f.Content)))
	}
	if want := []string{"verdict file yes", "link link ", "bin/sh file ", "sbin/cat file "}; !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
	if len(s.Repeated) != 1 || string(s.Repeated[0].Path) != path("also") || string(s.Repeated[0].Of) != path("bin") || len(s.Sum) != 64 {
		t.Errorf("repeated %+v, sum %q", s.Repeated, s.Sum)
	}
	q := quiesce(t, g, client.Quiescence{Look: &look})
	if q.Survey == nil || q.Survey.Sum != s.Sum || len(q.Survey.Files) != len(s.Files) {
		t.Errorf("a quiet guest has %+v", q.Survey)
	}
}

// Processes that end while they are looked at are nothing to be afraid of.
func TestSurveyWhileProcessesEnd(t *testing.T) {
	g := startInit(t)
	g.sh(t, `for i in 1 2 3; do sh -c 'while :; do /bin/true; done' churn </dev/null >/dev/null 2>&1 & done`)
	g.until(t, "churn")
	for range 200 {
		survey(t, g)
	}
	quiesce(t, g, client.Quiescence{})
}

// Every way of a program to stay alive that needs nothing but root.
func TestQuiesceEndsWhatIsNotKept(t *testing.T) {
	g := startInit(t)
	g.sh(t, "sleep 1001 </dev/null >/dev/null 2>&1 &")
	g.sh(t, `sh -c 'while ! [ -e go ]; do sleep 0.05; done; exec sleep 1002' </dev/null >/dev/null 2>&1 &`)
	g.until(t, "1001")
	keep := survey(t, g).Processes
	script := filepath.Join(g.dir, "respawn")
	// It starts itself anew all the time; each instance ignores requests to end.
	if err := os.WriteFile(script, []byte("#!/bin/sh\ntrap '' TERM HUP INT\nsleep 1003 &\nsleep 0.01\nsetsid \"$0\" &\nexec sleep 1004\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	g.sh(t, `exec </dev/null >/dev/null 2>&1
		touch go
		sleep 1005 &
		(setsid sh -c 'sleep 1006 & sleep 1007' &)
		sh -c 'kill -STOP $$; :' 1008 &
		sh -c 'trap "" TERM; sleep 1009; :' &
		sleep 1010 & mount -t tmpfs none /proc/$!
		setsid ./respawn &`)
	for _, arg := range []string{"1002", "1005", "1006", "1007", "1008", "1009", "1010", "1004"} {
		g.until(t, arg)
	}
	r := quiesce(t, g, client.Quiescence{Keep: keep, Grace: 50 * time.Millisecond})
	if len(r.Survivors) > 0 || r.Ended < 9 || len(r.Processes) == 0 {
		t.Errorf("got %+v", r)
	}
	left := survey(t, g)
	for _, p := range left.Processes {
		if p.PID != 1 && string(p.Args[len(p.Args)-1]) != "1001" {
			t.Errorf("%+v is still there", p)
		}
	}
	if !has(left, "1001") {
		t.Error("a process that was to be kept is gone")
	}
}

// A service whose worker is asked to end goes on, and one that is halted starts
// nothing any more.
func TestQuiesceHalts(t *testing.T) {
	g := startInit(t)
	g.sh(t, `sh -c 'while sleep 0.02; do echo x >> ticks; done' scheduler </dev/null >/dev/null 2>&1 &`)
	g.until(t, "scheduler")
	// A child that has not begun its own program yet looks the same.
	var scheduler client.ProcessInfo
	for _, p := range survey(t, g).Processes {
		if len(p.Args) > 0 && string(p.Args[len(p.Args)-1]) == "scheduler" && (scheduler.PID == 0 || p.PID < scheduler.PID) {
			scheduler = p
		}
	}
	r := quiesce(t, g, client.Quiescence{Keep: []client.ProcessInfo{scheduler}, Halt: func(client.ProcessInfo) bool { return true }, Grace: time.Second})
	if r.Halted != 1 || len(r.Survivors) > 0 || r.Unsettled {
		t.Errorf("got %+v", r)
	}
	eventually(t, "a scheduler that is stopped", func() bool {
		_, o := g.sh(t, "cat /proc/"+strconv.Itoa(scheduler.PID)+"/stat")
		return strings.Contains(o.stdout.String(), ") T ")
	})
}

func TestQuiesceChecksItsRequest(t *testing.T) {
	g := startInit(t)
	if _, err := g.Quiesce(t.Context(), client.Quiescence{Timeout: -time.Second, Grace: -time.Second}); err == nil {
		t.Error("a negative time is none")
	}
	other := g.with(client.Config{Generation: "00000000-0000-4000-8000-000000000001"})
	if _, err := other.Quiesce(context.Background(), client.Quiescence{Timeout: time.Second}); err == nil {
		t.Error("a guest of another generation was made quiet")
	}
}

func TestVacate(t *testing.T) {
	g := startInit(t)
	cases := []struct {
		name, script string
		unmounted    int
	}{
		{"nothing", "", 0},
		{"tree", "mkdir -p d/a/b; echo x > d/a/b/c; ln -s /etc d/e", 0},
		{"file", "echo x > d", 0},
		{"link", "mkdir -p kept; echo x > kept/x; ln -s kept d", 0},
		{"mounts", "mkdir -p d; mount -t tmpfs none d; mkdir d/e 'd/f g'; mount -t tmpfs none d/e; mount -t tmpfs none 'd/f g'; mount -t tmpfs none d", 4},
		{"bind mount", "mkdir -p d kept; echo x > kept/x; mount --bind kept d", 1},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if r, o := g.sh(t, "rm -rf d kept; "+c.script); r.ExitCode != 0 {
				t.Fatalf("prepare: %s", &o.stderr)
			}
			v, err := g.Vacate(t.Context(), client.EmptyDirectory{Path: filepath.Join(g.dir, "d"), User: "1000", Mode: 0o750})
			if err != nil {
				t.Fatal(err)
			}
			if v.Unmounted != c.unmounted {
				t.Errorf("%d mounts taken away, not %d", v.Unmounted, c.unmounted)
			}
			_, o := g.sh(t, "stat -c '%F %a %u' d; ls -A d | wc -l; [ ! -e kept ] || cat kept/x")
			want := "directory 750 1000\n0\n"
			if strings.Contains(c.script, "kept") {
				want += "x\n" // what the link or the mount led to stays
			}
			if o.stdout.String() != want {
				t.Errorf("got %q, want %q", &o.stdout, want)
			}
		})
	}
}

func TestVacateReplacesLinksAmongTheParents(t *testing.T) {
	g := startInit(t)
	g.sh(t, "mkdir elsewhere; ln -s elsewhere logs")
	if _, err := g.Vacate(t.Context(), client.EmptyDirectory{Path: filepath.Join(g.dir, "logs/verifier"), Mode: 0o755}, client.EmptyDirectory{Path: filepath.Join(g.dir, "other"), Mode: 0o755}); err != nil {
		t.Fatal(err)
	}
	if r, o := g.sh(t, "[ -d logs/verifier ] && [ -d other ] && [ ! -L logs ] && ls elsewhere"); r.ExitCode != 0 || o.stdout.Len() != 0 {
		t.Errorf("got %+v %s", r, &o.stdout)
	}
}

// Several are made at once, also one in another, and what is mounted on any of them goes.
func TestVacateSeveral(t *testing.T) {
	g := startInit(t)
	g.sh(t, "mkdir -p a kept c; mount -t tmpfs none a; mkdir a/b; ln -s $PWD/kept a/b/d; mount --bind kept c; echo x > kept/x")
	var directories []client.EmptyDirectory
	for _, name := range []string{"a", "a/b/d", "c"} {
		directories = append(directories, client.EmptyDirectory{Path: filepath.Join(g.dir, name), Mode: 0o700})
	}
	v, err := g.Vacate(t.Context(), directories...)
	if err != nil || v.Unmounted != 2 {
		t.Errorf("got %+v, %v", v, err)
	}
	if r, o := g.sh(t, "find a c kept -not -type d -o -type d -empty | sort"); r.ExitCode != 0 || o.stdout.String() != "a/b/d\nc\nkept/x\n" {
		t.Errorf("there is %s%s", &o.stdout, &o.stderr)
	}
}

func TestVacateUnlocks(t *testing.T) {
	g := startInit(t)
	if r, _ := g.sh(t, "mkdir -p d/e; echo x > d/e/f; chattr +i d/e/f && chattr +a d/e && chattr +i d"); r.ExitCode != 0 {
		g.sh(t, "chattr -i d/e/f d; chattr -a d/e")
		t.Skip("this file system or machine has no immutable files")
	}
	v, err := g.Vacate(t.Context(), client.EmptyDirectory{Path: filepath.Join(g.dir, "d"), Mode: 0o755})
	if err != nil || v.Unlocked != 3 {
		t.Errorf("got %+v, %v", v, err)
	}
	if entries, err := os.ReadDir(filepath.Join(g.dir, "d")); err != nil || len(entries) > 0 {
		t.Errorf("got %v, %v", entries, err)
	}
}

func TestVacateKeepsTheRoot(t *testing.T) {
	g := startInit(t)
	for _, path := range []string{"/", "//", "relative", "/x\x00"} {
		if _, err := g.Vacate(t.Context(), client.EmptyDirectory{Path: path, Mode: 0o755}); err == nil {
			t.Errorf("%q was vacated", path)
		}
	}
	if _, err := os.Stat("/etc"); err != nil || syscall.Access("/bin", 0) != nil {
		t.Fatal("the file system is gone")
	}
}

// A service that starts its workers anew does not stand in the way, and goes on
// afterwards.
func TestQuiesceHoldsWhatIsKept(t *testing.T) {
	g := startInit(t)
	g.sh(t, `sh -c 'trap "" TERM; while :; do sleep 2000; done' supervisor </dev/null >/dev/null 2>&1 &`)
	g.until(t, "2000")
	var keep []client.ProcessInfo
	for _, p := range survey(t, g).Processes {
		if len(p.Args) > 0 && string(p.Args[len(p.Args)-1]) == "supervisor" {
			keep = append(keep, p)
		}
	}
	if r := quiesce(t, g, client.Quiescence{Keep: keep, Grace: 10 * time.Millisecond}); len(keep) != 1 || len(r.Survivors) > 0 || r.Ended == 0 {
		t.Errorf("kept %+v, got %+v", keep, r)
	}
	g.until(t, "2000")
}
