package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/guest/image"
)

// qemuCID is the guest's address; the host's kernel is in between (vhost).
const qemuCID = 77

// qemu is QEMU's microvm, which restores a guest from a migration file.
type qemu struct {
	program, firmware string
	scene             SceneConfig
	commandLine       string
	extra             []string // arguments
}

func (b *bench) qemu(ctx context.Context) error {
	return b.measureRival(ctx, "qemu", func(c SceneConfig) (rival, error) { return findQEMU(c) })
}

// findQEMU returns QEMU with more arguments, or errNotRun.
func findQEMU(c SceneConfig, extra ...string) (rival, error) {
	program, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return nil, errNotRun{"no qemu-system-x86_64 here"}
	}
	// Loads the module; that it fails shows below.
	_ = exec.Command("modprobe", "vhost_vsock").Run()
	if _, err := os.Stat("/dev/vhost-vsock"); err != nil {
		return nil, errNotRun{err.Error()}
	}
	commandLine, err := c.commandLine()
	return &qemu{program: program, firmware: c.Firmware, scene: c, commandLine: commandLine, extra: extra}, err
}

// commandLine is the image's.
func (c SceneConfig) commandLine() (string, error) {
	img, err := image.Open(c.Image)
	if err != nil {
		return "", err
	}
	return img.Manifest().CommandLine, nil
}

func (q *qemu) command(dir, saved string) (*exec.Cmd, error) {
	args := []string{
		"-M", "microvm,accel=kvm,x-option-roms=off,isa-serial=on,rtc=on", "-cpu", "host", "-smp", "1",
		"-m", fmt.Sprint(standardMemory >> 20), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "file:" + consoleLog, "-qmp", "unix:qmp.sock,server=on,wait=off",
		"-kernel", filepath.Join(q.scene.Image, string(image.Kernel)), "-initrd", filepath.Join(q.scene.Image, string(image.Initrd)),
		"-append", q.commandLine,
		"-drive", "id=root,file=disk,format=raw,if=none", "-device", "virtio-blk-device,drive=root",
		"-device", fmt.Sprintf("vhost-vsock-device,guest-cid=%d", qemuCID), "-device", "virtio-rng-device",
	}
	args = append(args, q.extra...)
	if q.firmware != "" {
		args = append(args, "-L", q.firmware)
	}
	if saved == "" {
		return exec.Command(q.program, args...), nil
	}
	state, err := os.Open(filepath.Join(saved, "state"))
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(q.program, append(args, "-incoming", "fd:3")...)
	cmd.ExtraFiles = []*os.File{state}
	return cmd, nil
}

// start waits until a restored guest runs: what asks for it before that would be
// cut off by the reset that its vsock device announces.
func (q *qemu) start(ctx context.Context, dir, saved string) error {
	if saved == "" {
		return nil
	}
	path := filepath.Join(dir, "qmp.sock")
	if err := awaitFile(ctx, path); err != nil {
		return fmt.Errorf("qemu: %w", err)
	}
	m, err := dialQMP(ctx, path)
	if err != nil {
		return err
	}
	defer m.close()
	return m.awaitRunning()
}

func (q *qemu) dial(ctx context.Context, _ string) (net.Conn, error) {
	return dialVsock(ctx, qemuCID, proto.Port)
}

// save writes a migration file. The guest runs until the end of it: one that had
// been stopped before would be restored as stopped.
func (q *qemu) save(ctx context.Context, dir, saved string) error {
	m, err := dialQMP(ctx, filepath.Join(dir, "qmp.sock"))
	if err != nil {
		return err
	}
	defer m.close()
	// No limit to its speed.
	if _, err := m.call("migrate-set-parameters", map[string]any{"max-bandwidth": 0}); err != nil {
		return err
	}
	if _, err := m.call("migrate", map[string]any{"uri": "exec:cat > " + filepath.Join(saved, "state")}); err != nil {
		return err
	}
	for {
		answer, err := m.call("query-migrate", nil)
		if err != nil {
			return err
		}
		var state struct {
			Status string `json:"status"`
			Error  string `json:"error-desc"`
		}
		if err := json.Unmarshal(answer, &state); err != nil {
			return err
		}
		switch state.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("migration %s: %s", state.Status, state.Error)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// qmp speaks QEMU's machine protocol: a JSON document for each command, and
// events in between the answers.
type qmp struct {
	conn net.Conn
	in   *json.Decoder
}

func dialQMP(ctx context.Context, path string) (*qmp, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	m := &qmp{conn: c, in: json.NewDecoder(c)}
	var greeting json.RawMessage
	if err := m.in.Decode(&greeting); err != nil {
		c.Close()
		return nil, err
	}
	if _, err := m.call("qmp_capabilities", nil); err != nil {
		c.Close()
		return nil, err
	}
	return m, nil
}

func (m *qmp) close() { m.conn.Close() }

// awaitRunning returns when the guest runs.
func (m *qmp) awaitRunning() error {
	answer, err := m.call("query-status", nil)
	if err != nil {
		return err
	}
	var state struct {
		Running bool `json:"running"`
	}
	if err := json.Unmarshal(answer, &state); err != nil || state.Running {
		return err
	}
	for {
		var event struct {
			Event string `json:"event"`
		}
		if err := m.in.Decode(&event); err != nil {
			return fmt.Errorf("qemu: wait for the guest to run: %w", err)
		}
		if event.Event == "RESUME" {
			return nil
		}
	}
}

func (m *qmp) call(command string, arguments any) (json.RawMessage, error) {
	request := map[string]any{"execute": command}
	if arguments != nil {
		request["arguments"] = arguments
	}
	data, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	if _, err := m.conn.Write(data); err != nil {
		return nil, fmt.Errorf("qemu %s: %w", command, err)
	}
	for {
		var answer struct {
			Return json.RawMessage `json:"return"`
			Error  *struct {
				Description string `json:"desc"`
			} `json:"error"`
		}
		if err := m.in.Decode(&answer); err != nil {
			return nil, fmt.Errorf("qemu %s: %w", command, err)
		}
		switch {
		case answer.Error != nil:
			return nil, fmt.Errorf("qemu %s: %s", command, answer.Error.Description)
		case answer.Return != nil:
			return answer.Return, nil
		}
	}
}

// version is the first line of what a program says of itself.
func version(program string) string {
	said, err := exec.Command(program, "--version").Output()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(said), "\n")
	return line
}
