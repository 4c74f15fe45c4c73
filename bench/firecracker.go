package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/guest/image"
)

// firecracker restores a guest from its own snapshot, through its public API.
// Paths are relative to the process's directory, so that a restored guest finds a
// disk and a socket of its own.
type firecracker struct {
	program, commandLine string
	scene                SceneConfig
}

func (b *bench) firecracker(ctx context.Context) error {
	return b.measureRival(ctx, "firecracker", func(c SceneConfig) (rival, error) {
		if c.Firecracker == "" {
			return nil, errNotRun{"FIRECRACKER=path names no program"}
		}
		if _, err := os.Stat(c.Firecracker); err != nil {
			return nil, errNotRun{err.Error()}
		}
		b.note("firecracker: %s", version(c.Firecracker))
		commandLine, err := c.commandLine()
		return &firecracker{program: c.Firecracker, commandLine: commandLine, scene: c}, err
	})
}

func (f *firecracker) command(string, string) (*exec.Cmd, error) {
	return exec.Command(f.program, "--api-sock", "api.sock"), nil
}

func (f *firecracker) dial(ctx context.Context, dir string) (net.Conn, error) {
	return connectPort(ctx, filepath.Join(dir, "vsock.sock"), proto.Port)
}

// start configures the machine and boots it, or loads the snapshot.
func (f *firecracker) start(ctx context.Context, dir, saved string) error {
	api := newAPI(filepath.Join(dir, "api.sock"))
	defer api.close()
	if err := awaitFile(ctx, api.path); err != nil {
		return fmt.Errorf("firecracker: %w", err)
	}
	if saved != "" {
		return api.put(ctx, "/snapshot/load", map[string]any{
			"snapshot_path": filepath.Join(saved, "state"),
			"mem_backend":   map[string]any{"backend_type": "File", "backend_path": filepath.Join(saved, "memory")},
			"resume_vm":     true,
		})
	}
	for _, step := range []struct {
		path string
		body map[string]any
	}{
		{"/machine-config", map[string]any{"vcpu_count": 1, "mem_size_mib": standardMemory >> 20}},
		{"/boot-source", map[string]any{
			"kernel_image_path": filepath.Join(f.scene.Image, string(image.Kernel)),
			"initrd_path":       filepath.Join(f.scene.Image, string(image.Initrd)),
			"boot_args":         f.commandLine,
		}},
		{"/drives/root", map[string]any{"drive_id": "root", "path_on_host": "disk", "is_root_device": false, "is_read_only": false}},
		{"/vsock", map[string]any{"guest_cid": 3, "uds_path": "vsock.sock"}},
		{"/entropy", map[string]any{}},
		{"/actions", map[string]any{"action_type": "InstanceStart"}},
	} {
		if err := api.put(ctx, step.path, step.body); err != nil {
			return err
		}
	}
	return nil
}

func (f *firecracker) save(ctx context.Context, dir, saved string) error {
	api := newAPI(filepath.Join(dir, "api.sock"))
	defer api.close()
	if err := api.send(ctx, http.MethodPatch, "/vm", map[string]any{"state": "Paused"}); err != nil {
		return err
	}
	return api.put(ctx, "/snapshot/create", map[string]any{
		"snapshot_type": "Full",
		"snapshot_path": filepath.Join(saved, "state"),
		"mem_file_path": filepath.Join(saved, "memory"),
	})
}

// api is Firecracker's HTTP API on a Unix socket.
type api struct {
	path   string
	client *http.Client
}

func newAPI(path string) *api {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var dialer net.Dialer
		return dialer.DialContext(ctx, "unix", path)
	}
	return &api{path: path, client: &http.Client{Transport: &http.Transport{DialContext: dial}}}
}

func (a *api) close() { a.client.CloseIdleConnections() }

func (a *api) put(ctx context.Context, path string, body any) error {
	return a.send(ctx, http.MethodPut, path, body)
}

func (a *api) send(ctx context.Context, method, path string, body any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path, bytes.NewReader(data))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := a.client.Do(request)
	if err != nil {
		return fmt.Errorf("firecracker %s: %w", path, err)
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		said, err := io.ReadAll(io.LimitReader(response.Body, 4096))
		return errors.Join(fmt.Errorf("firecracker %s: %s: %s", path, response.Status, said), err)
	}
	return nil
}
