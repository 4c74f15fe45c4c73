package initramfs

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseConfig(t *testing.T) {
	tests := []struct {
		name, json string
		want       Config
		err        string
	}{
		{"empty", `{}`, Config{Mode: ModePID1, RootType: "ext4", Init: "/sbin/init"}, ""},
		{"whole", `{"modules":["/lib/modules/virtio_blk.ko"],"root":"/dev/vda","root_type":"xfs","root_read_only":true,"mode":"handover","init":"/init2","hostname":"h","later":1}`,
			Config{[]string{"/lib/modules/virtio_blk.ko"}, "/dev/vda", "xfs", true, ModeHandover, "/init2", "h"}, ""},
		{"no JSON", `root=/dev/vda`, Config{}, "invalid character"},
		{"mode", `{"mode":"chroot"}`, Config{}, `mode "chroot"`},
		{"handover to nothing", `{"mode":"handover"}`, Config{}, "needs a root device"},
		{"relative root", `{"root":"vda"}`, Config{}, `path "vda" is not absolute`},
		{"relative module", `{"modules":["x.ko"]}`, Config{}, `path "x.ko" is not absolute`},
		{"hostname", `{"hostname":"` + strings.Repeat("h", 65) + `"}`, Config{}, "65 bytes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := ParseConfig([]byte(tt.json))
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want one with %q", err, tt.err)
				}
				return
			}
			if err != nil || !reflect.DeepEqual(c, tt.want) {
				t.Errorf("got %+v, %v, want %+v", c, err, tt.want)
			}
		})
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"modules":["/a"],"root":"/dev/vda","mode":"handover"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseConfig(b)
		if err == nil && c.Mode == ModeHandover && c.Root == "" {
			t.Fatalf("accepted %+v", c)
		}
	})
}

func TestLoadWithoutFile(t *testing.T) {
	c, err := Load(filepath.Join(t.TempDir(), "none"))
	if err != nil || c.Mode != ModePID1 {
		t.Errorf("got %+v, %v", c, err)
	}
}

// The message for a root device that is not there names what is missing.
func TestDiagnose(t *testing.T) {
	tests := []struct {
		name   string
		files  map[string]string // below sysfs; no content: a directory
		failed []error
		want   string
	}{
		{"nothing", nil, nil, "no virtio_blk driver; no virtio_mmio driver; no virtio devices; no disks at all"},
		{"no disk driver", map[string]string{
			"bus/platform/drivers/virtio-mmio": "", "bus/virtio/devices/virtio0/device": "0x0002\n",
		}, []error{errors.New("load module (/virtio_blk.ko): not in the initramfs")},
			"no virtio_blk driver; no disks at all; load module (/virtio_blk.ko): not in the initramfs"},
		{"no disk", map[string]string{
			"bus/virtio/drivers/virtio_blk": "", "bus/platform/drivers/virtio-mmio": "",
			"bus/virtio/devices/virtio0/device": "0x0013\n", "bus/virtio/devices/virtio1/device": "0x0004\n",
		}, nil, "2 virtio devices, none of them a disk; no disks at all"},
		{"another disk", map[string]string{
			"bus/virtio/drivers/virtio_blk": "", "bus/virtio/devices/virtio0/device": "0x0002\n", "class/block/vdb": "",
		}, nil, "disks found: vdb"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			sys := t.TempDir()
			for path, content := range tt.files {
				path = filepath.Join(sys, path)
				if content == "" {
					os.MkdirAll(path, 0o755)
					continue
				}
				os.MkdirAll(filepath.Dir(path), 0o755)
				os.WriteFile(path, []byte(content), 0o644)
			}
			if got := diagnose(sys, tt.failed); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestModuleErrors(t *testing.T) {
	err := loadModule(filepath.Join(t.TempDir(), "x.ko"))
	if err == nil || !strings.Contains(err.Error(), "not in the initramfs") {
		t.Errorf("error %v", err)
	}
	if hint := moduleHint(unix.ENOENT); !strings.Contains(hint, "symbol") {
		t.Errorf("hint %q", hint)
	}
}

func TestMountPoints(t *testing.T) {
	got := mountPoints([]byte("/dev/vda / ext4 rw 0 0\ntmpfs /mnt/a\\040b\\134c tmpfs rw 0 0\nbroken\n\n"))
	if want := []string{"/", `/mnt/a b\c`}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestClearDirStaysOnItsDevice(t *testing.T) {
	dir := t.TempDir()
	os.MkdirAll(filepath.Join(dir, "a/b/c"), 0o755)
	os.WriteFile(filepath.Join(dir, "a/b/file"), nil, 0o644)
	os.Symlink("/etc/passwd", filepath.Join(dir, "a/link"))
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	clearDir(dir, st.Dev+1)
	if len(names(filepath.Join(dir, "a/b"))) != 2 {
		t.Error("it deleted on another device")
	}
	clearDir(dir, st.Dev)
	if left := names(dir); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	if _, err := os.Stat("/etc/passwd"); err != nil {
		t.Error("it followed a symbolic link")
	}
}
