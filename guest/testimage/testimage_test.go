package testimage

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/guest/initramfs"
)

func TestImages(t *testing.T) {
	kernel := os.Getenv("FORKVM_TEST_KERNEL_DEB")
	if kernel == "" {
		t.Skip("FORKVM_TEST_KERNEL_DEB is not set to the path of a linux-image package (apt-get download linux-image-6.12…-cloud-amd64)")
	}
	const busybox = "/bin/busybox"
	if err := checkStatic(busybox); err != nil {
		t.Skip(err)
	}
	cache := t.TempDir()
	for name, c := range map[string]Config{
		"in memory": {},
		"on a disk": {Disk: true},
		"handover":  {Disk: true, Mode: initramfs.ModeHandover},
	} {
		t.Run(name, func(t *testing.T) {
			c.Output, c.Kernel, c.Cache = filepath.Join(t.TempDir(), "image"), kernel, cache
			c.Agent = busybox // any static program will do
			i, err := Build(context.Background(), c)
			if err != nil {
				t.Fatal(err)
			}
			if i.Has(image.Rootfs) != c.Disk || c.Mode != "" && i.Manifest().Mode != c.Mode {
				t.Errorf("%+v", i.Manifest())
			}
			if left, _ := os.ReadDir(filepath.Dir(c.Output)); len(left) != 1 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestDynamicBusyboxIsRefused(t *testing.T) {
	if _, err := Build(context.Background(), Config{Busybox: "/usr/bin/env"}); err == nil {
		t.Error("no error")
	}
}
