package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/node"
)

// sshPort is the vsock port of the guest at which sshd is.
const sshPort = 22

// sshConfig is the server's, and nobody but the benchmark reaches it.
const sshConfig = `HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin yes
StrictModes no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
PrintLastLog no
`

// secureShell is OpenSSH: a server in a guest, reached through vsock as systemd does
// it, with the socket as standard input and output of a new sshd, and its client here.
type secureShell struct {
	vm  *node.VM
	dir string // for the client's key and the socket of its connection
}

// ssh measures the same as exec and transfer with OpenSSH. Nothing of it is changed:
// its encryption and its authentication are what people compare with.
func (b *bench) ssh(ctx context.Context) error {
	sshd := b.config.Scene.SSHD
	if _, err := exec.LookPath("ssh"); err != nil || sshd == "" {
		b.note("ssh_true: not run: no OpenSSH here")
		b.extra = append(b.extra, "ssh_true")
		b.rows["ssh_true"] = Result{Name: "ssh_true", Unit: CMS}
		return nil
	}
	return b.used(ctx, func(vm *node.VM) error {
		s := &secureShell{vm: vm, dir: filepath.Join(b.config.Scene.Dir, "ssh")}
		if err := s.install(ctx, sshd); err != nil {
			return err
		}
		samples, err := repeat(b.config.Rounds, func() error { return s.once(ctx) })
		if err != nil {
			return err
		}
		b.row("ssh_true", CMS, samples)
		return s.shared(ctx, func(run func(in io.Reader, args ...string) error) error {
			samples, err := repeat(b.config.Rounds, func() error { return run(nil, "true") })
			if err != nil {
				return err
			}
			b.row("ssh_shared_true", CMS, samples)
			err = b.perMiB("ssh_stdout_mib", func() error { return run(nil, producer...) })
			if err != nil {
				return err
			}
			return b.perMiB("ssh_stdin_mib", func() error { return run(zeros(), consumer...) })
		})
	})
}

// install puts the server and keys into the guest and starts what waits for
// connections.
func (s *secureShell) install(ctx context.Context, tree string) error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	for _, name := range []string{"host", "client"} {
		out, err := exec.CommandContext(ctx, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(s.dir, name)).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ssh-keygen: %w: %s", err, out)
		}
	}
	root, err := os.OpenRoot(tree)
	if err != nil {
		return err
	}
	defer root.Close()
	agent := s.vm.Agent()
	if _, err := agent.Upload(ctx, root, "/", false); err != nil {
		return err
	}
	if err := run(ctx, s.vm, "sh", "-c", "mkdir -p /run/sshd /etc/ssh; echo sshd:x:74:74::/run/sshd:/bin/false >>/etc/passwd"); err != nil {
		return err
	}
	for guest, host := range map[string]string{"key": "host", "authorized_keys": "client.pub"} {
		if err := s.put(ctx, "/etc/ssh/"+guest, filepath.Join(s.dir, host)); err != nil {
			return err
		}
	}
	if _, err := agent.Put(ctx, client.File{Path: "/etc/ssh/sshd_config"}, strings.NewReader(sshConfig)); err != nil {
		return err
	}
	_, err = agent.Detach(ctx, client.Command{Args: []string{
		"/usr/sbin/guestload", "spawn", "-port", fmt.Sprint(sshPort), "/usr/sbin/sshd", "-i", "-f", "/etc/ssh/sshd_config",
	}})
	time.Sleep(settle)
	return err
}

func (s *secureShell) put(ctx context.Context, to, from string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = s.vm.Agent().Put(ctx, client.File{Path: to, Mode: 0o600}, f)
	return err
}

// command is ssh with the options of all calls. The name of the host stands for
// the connection that it is given.
func (s *secureShell) command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "ssh", append([]string{
		"-F", "none", "-i", filepath.Join(s.dir, "client"), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
		"-o", "LogLevel=ERROR", "-o", "BatchMode=yes",
	}, args...)...)
}

// connected is ssh over a connection to the guest that is its standard input and
// output, which it takes for that with "-" as the proxy.
func (s *secureShell) connected(ctx context.Context, args ...string) (*exec.Cmd, error) {
	conn, err := connectPort(ctx, s.vm.VsockPath(), sshPort)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	f, err := conn.(*net.UnixConn).File()
	if err != nil {
		return nil, err
	}
	cmd := s.command(ctx, append([]string{"-o", "ProxyCommand=-"}, args...)...)
	cmd.Stdin, cmd.Stdout = f, f
	return cmd, nil
}

// once runs true over a connection of its own.
func (s *secureShell) once(ctx context.Context) error {
	cmd, err := s.connected(ctx, "-n", "root@guest", "true")
	if err != nil {
		return err
	}
	defer cmd.Stdin.(*os.File).Close()
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("ssh: %w: %s", err, &said)
	}
	return nil
}

// shared makes one connection, over which the commands of do run, each by a client of
// its own (ControlMaster).
func (s *secureShell) shared(ctx context.Context, do func(run func(in io.Reader, args ...string) error) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	control := filepath.Join(s.dir, "control")
	master, err := s.connected(ctx, "-M", "-N", "-S", control, "root@guest")
	if err != nil {
		return err
	}
	defer master.Stdin.(*os.File).Close()
	var said strings.Builder
	master.Stderr = &said
	if err := master.Start(); err != nil {
		return err
	}
	defer func() {
		cancel()
		_ = master.Wait() // killed
	}()
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(control); err == nil {
			break
		}
		if time.Since(begin) > patience {
			return errors.New("ssh: no connection: " + said.String())
		}
	}
	return do(func(in io.Reader, args ...string) error {
		cmd := s.command(ctx, append([]string{"-S", control, "root@guest"}, args...)...)
		cmd.Stdin = in
		var said strings.Builder
		cmd.Stderr = &said
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("ssh: %w: %s", err, &said)
		}
		return nil
	})
}
