package initramfs

import (
	"bytes"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden file again")

func example() Config {
	return Config{
		Agent:   strings.NewReader("the guest agent"),
		Size:    15,
		Modules: []Module{{"vsock", []byte("module 1")}, {"virtio_blk", []byte("module two")}},
		Boot:    Boot{Root: "/dev/vda", RootType: "ext4", Mode: ModeHandover, Hostname: "guest"},
		Files: []File{
			{Path: "/bin/sh", Target: "busybox"},
			{Path: "/bin/busybox", Mode: 0o755, Content: []byte("busybox")},
			{Path: "/etc/empty", Mode: 0o600},
		},
	}
}

func build(t *testing.T, c Config) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := Write(&out, c); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestArchiveIsAsItWas(t *testing.T) {
	got := build(t, example())
	const path = "testdata/example.cpio"
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("archive differs from %s (run with -update if that is right):\n%q", path, got)
	}
}

// cpio(1) judges the format.
func TestCpioListsTheArchive(t *testing.T) {
	tool, err := exec.LookPath("cpio")
	if err != nil {
		t.Skip("cpio is not installed (apt-get install cpio)")
	}
	cmd := exec.Command(tool, "--list", "--verbose", "--numeric-uid-gid", "--quiet")
	cmd.Stdin = bytes.NewReader(build(t, example()))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var lines []string
	for line := range strings.Lines(string(out)) {
		mode, _, _ := strings.Cut(line, " ")
		_, name, _ := strings.Cut(line, " 1970 ")
		lines = append(lines, mode+" "+strings.TrimSpace(name))
	}
	want := []string{
		"drwxr-xr-x dev", "dr-xr-xr-x proc", "drwxr-xr-x run", "dr-xr-xr-x sys", "drwxrwxrwt tmp",
		"crw------- dev/console", "crw-rw-rw- dev/null", "-rwxr-xr-x init",
		"drwxr-xr-x lib", "drwxr-xr-x lib/modules", "-rw-r--r-- lib/modules/vsock.ko", "-rw-r--r-- lib/modules/virtio_blk.ko",
		"drwxr-xr-x etc", "drwxr-xr-x etc/forkvm", "-rw-r--r-- etc/forkvm/initramfs.json",
		"drwxr-xr-x bin", "-rwxr-xr-x bin/busybox", "lrwxrwxrwx bin/sh -> busybox", "-rw------- etc/empty",
	}
	if got := strings.Join(lines, "\n"); got != strings.Join(want, "\n") {
		t.Errorf("got:\n%s\nwant:\n%s", got, strings.Join(want, "\n"))
	}
}

func TestGuestIsToldWhatToDo(t *testing.T) {
	archive := string(build(t, example()))
	for _, want := range []string{
		`"modules": [
    "/lib/modules/vsock.ko",
    "/lib/modules/virtio_blk.ko"
  ]`, `"root": "/dev/vda"`, `"root_type": "ext4"`, `"mode": "handover"`, `"hostname": "guest"`,
	} {
		if !strings.Contains(archive, want) {
			t.Errorf("archive lacks %s", want)
		}
	}
}

func TestRefusals(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"no mode":               func(c *Config) { c.Boot.Mode = "" },
		"handover without root": func(c *Config) { c.Boot.Root = "" },
		"module name":           func(c *Config) { c.Modules[0].Name = "../x" },
		"relative path":         func(c *Config) { c.Files[0].Path = "bin/sh" },
		"unclean path":          func(c *Config) { c.Files[0].Path = "/bin/../sh" },
		"zero byte":             func(c *Config) { c.Files[0].Path = "/bin\x00" },
		"short agent":           func(c *Config) { c.Size = 1000 },
		"huge agent":            func(c *Config) { c.Size = 1 << 32 },
	} {
		c := example()
		change(&c)
		if err := Write(io.Discard, c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestWriteErrorComesBack(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := Write(f, example()); err == nil {
		t.Error("no error")
	}
}
