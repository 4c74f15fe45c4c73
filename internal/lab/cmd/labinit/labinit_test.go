package main

import (
	"archive/tar"
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/testkit"
)

func TestWriteTar(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sub", "file"), []byte("text"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("sub/file", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	socket, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	var buf bytes.Buffer
	if err := writeTar(&buf, dir); err != nil {
		t.Fatal(err)
	}
	var entries []string
	for archive := tar.NewReader(&buf); ; {
		header, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, header.Name+"="+string(content)+header.Linkname)
	}
	if got, want := strings.Join(entries, " "), "link=sub/file sub= sub/file=text"; got != want {
		t.Errorf("archive has %q, want %q", got, want)
	}
	if err := writeTar(io.Discard, filepath.Join(dir, "absent")); err == nil {
		t.Error("archived what does not exist")
	}
}

func TestDisksBySerial(t *testing.T) {
	dir := t.TempDir()
	for name, serial := range map[string]string{"vda": "scratch", "vdb": "in0\n", "loop0": ""} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if serial == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name, "serial"), []byte(serial), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	disks, err := disksBySerial(dir)
	if err != nil || len(disks) != 2 || disks["scratch"] != "/dev/vda" || disks["in0"] != "/dev/vdb" {
		t.Errorf("disks %v, %v", disks, err)
	}
}

func TestLiveName(t *testing.T) {
	if got := liveName("self"); !strings.Contains(got, "labinit") {
		t.Errorf("own name %q", got)
	}
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	// Until it is waited for it is a zombie, which is no live process.
	pid := strconv.Itoa(cmd.Process.Pid)
	for i := 0; liveName(pid) != ""; i++ {
		if i == 1_000_000 {
			t.Fatal("a zombie has a name")
		}
	}
}

// What the lab machine promises to every command, seen from inside.
func TestMachinePromises(t *testing.T) {
	testkit.RequireKVM(t)
	if !testkit.InLab() {
		t.Skip("is about the lab machine: run it there")
	}
	for _, path := range []string{"/dev/kvm", "/dev/net/tun", "/dev/ptmx", "/dev/shm", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/bpf", "/out", "/var/lib/forkvm"} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	data, err := os.ReadFile("/proc/1/cmdline")
	if err != nil || !bytes.HasPrefix(data, []byte("/init\x00")) {
		t.Errorf("process 1 is %q, %v", data, err)
	}
}
