package lab

import (
	"bufio"
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"os"
	"strings"
)

// initramfsFormat changes whenever this file makes something else of the same inputs.
const initramfsFormat = "3"

// etcFiles are the files below /etc without which ordinary programs misbehave.
var etcFiles = map[string]string{
	"passwd": "root:x:0:0:root:/root:/bin/sh\ndev:x:1000:1000:dev:/home/dev:/bin/sh\n" +
		"nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
	"group":         "root:x:0:\ntty:x:5:\nkvm:x:104:\ndev:x:1000:\nnogroup:x:65534:\n",
	"hosts":         "127.0.0.1 localhost lab\n::1 localhost\n",
	"nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
	"hostname":      "lab\n",
	"os-release":    "ID=forkvm-lab\nNAME=\"forkvm lab\"\nPRETTY_NAME=\"forkvm lab\"\n",
	"profile":       "PS1='lab:\\w# '\n",
}

// makeInitramfs returns the archive that the machine boots into: first program, busybox, modules and programs of this machine.
func makeInitramfs(ctx context.Context, c cache, k kernelFiles, tools []string) (string, error) {
	first, err := buildInit(ctx, c)
	if err != nil {
		return "", err
	}
	programs := append(append([]string{}, hostPrograms...), tools...)
	key, err := initramfsKey(first, k, programs)
	if err != nil {
		return "", err
	}
	return c.get("initramfs-"+key, func(path string) error {
		t, err := initramfsTree(ctx, k, programs)
		if err != nil {
			return err
		}
		return writeInitramfs(path, t, first)
	})
}

func initramfsKey(first []byte, k kernelFiles, programs []string) (string, error) {
	parts := []string{initramfsFormat, string(first), k.key, strings.Join(loadedModules, " "), strings.Join(offeredModules, " ")}
	for _, path := range append([]string{"busybox"}, programs...) {
		path, err := findProgram(path)
		if err != nil {
			return "", err
		}
		key, err := statKey(path)
		if err != nil {
			return "", err
		}
		parts = append(parts, key)
	}
	return keyOf(parts...), nil
}

func initramfsTree(ctx context.Context, k kernelFiles, programs []string) (tree, error) {
	t := make(tree)
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		t.link("/"+dir, "usr/"+dir)
	}
	for name, text := range etcFiles {
		t.file("/etc/"+name, 0o644, []byte(text))
	}
	if data, err := os.ReadFile("/etc/mke2fs.conf"); err == nil {
		t.file("/etc/mke2fs.conf", 0o644, data)
	}
	if err := t.addBusybox(ctx); err != nil {
		return nil, err
	}
	for _, name := range programs {
		if err := t.addProgram(name); err != nil {
			return nil, err
		}
	}
	for name, target := range programAliases {
		t.link("/usr/bin/"+name, target)
	}
	opened, err := k.open()
	if err != nil {
		return nil, err
	}
	modules, err := readModules(opened)
	if err != nil {
		return nil, err
	}
	t.addModules(opened.Release, modules)
	return t, nil
}

// addBusybox adds busybox under the names of all its applets. Programs added later replace the applet of their name.
func (t tree) addBusybox(ctx context.Context) error {
	path, err := findProgram("busybox")
	if err != nil {
		return err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if file, err := elf.NewFile(bytes.NewReader(data)); err != nil {
		return fmt.Errorf("use %s: %w", path, err)
	} else if interpreter(file) != "" {
		return fmt.Errorf("use %s: dynamically linked; install the static one with: apt-get install busybox-static", path)
	}
	applets, err := output(ctx, "", "busybox", "--list")
	if err != nil {
		return err
	}
	t.file("/usr/bin/busybox", 0o755, data)
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" {
			t.link("/usr/bin/"+applet, "busybox")
		}
	}
	// Where the kernel looks for it to load a module on demand.
	t.link("/usr/sbin/modprobe", "../bin/busybox")
	return nil
}

func writeInitramfs(path string, t tree, first []byte) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		if e := file.Close(); err == nil {
			err = e
		}
	}()
	w := bufio.NewWriterSize(file, 1<<20)
	if err := t.writeTo(w, first); err != nil {
		return err
	}
	return w.Flush()
}

// buildInit builds the machine's first program with the go command, which has its own cache. It is called in the
// module's directory or below.
func buildInit(ctx context.Context, c cache) ([]byte, error) {
	dir, err := os.MkdirTemp(c.dir, ".build-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := goBuild(ctx, dir+"/labinit", "github.com/forkvm/forkvm/internal/lab/cmd/labinit"); err != nil {
		return nil, err
	}
	return os.ReadFile(dir + "/labinit")
}
