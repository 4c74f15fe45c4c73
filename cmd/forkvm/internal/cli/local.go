package cli

import (
	"context"
	"path/filepath"

	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/internal/process"
)

// Local is the node of this machine as the verbs see it.
func Local(n *node.Node) Node { return local{n} }

type local struct{ *node.Node }

func (l local) Boot(ctx context.Context, image string, o node.Options) (VM, error) {
	return l.wrap(l.Node.Boot(ctx, image, o))
}

func (l local) Restore(ctx context.Context, snapshot string, o node.Options) (VM, error) {
	return l.wrap(l.Node.Restore(ctx, snapshot, o))
}

func (l local) Find(ref string) (VM, error) { return l.wrap(l.Node.Find(ref)) }

func (l local) List() ([]VM, error) {
	all, err := l.Node.List()
	vms := make([]VM, len(all))
	for i, vm := range all {
		vms[i] = localVM{vm, l}
	}
	return vms, err
}

func (l local) Rollouts() ([]Rollout, error) {
	all, err := l.Node.Rollouts()
	rollouts := make([]Rollout, len(all))
	for i, r := range all {
		rollouts[i] = r
	}
	return rollouts, err
}

func (l local) FindRollout(ref string) (Rollout, error) {
	r, err := l.Node.FindRollout(ref)
	if err != nil {
		return nil, err // not a rollout that holds a nil
	}
	return r, nil
}

func (l local) wrap(vm *node.VM, err error) (VM, error) {
	if err != nil {
		return nil, err // not a VM that holds a nil
	}
	return localVM{vm, l}, nil
}

func (l local) BuildImage(ctx context.Context, name string, c image.Config) (Image, error) {
	made, err := l.Node.BuildImage(ctx, name, c)
	if err != nil {
		return Image{}, err
	}
	return Image{Name: name, Manifest: made.Manifest()}, nil
}

func (l local) Images() ([]Image, error) {
	all, err := l.Node.Images()
	images := make([]Image, len(all))
	for i, img := range all {
		images[i] = Image{Name: img.Name, Err: img.Err}
		if img.Image != nil {
			images[i].Manifest = img.Manifest()
		}
	}
	return images, err
}

type localVM struct {
	*node.VM
	node local
}

func (v localVM) Record() node.Record { return v.VM.Record }

func (v localVM) Guest() Guest { return v.Agent() }

func (v localVM) Paths() Paths {
	return Paths{
		Directory: v.Directory(),
		Console:   filepath.Join(v.Directory(), process.ConsoleFile),
		Vsock:     v.VsockPath(),
	}
}

func (v localVM) Fork(ctx context.Context, options []node.Options) ([]Child, error) {
	made, err := v.node.Node.Fork(ctx, v.VM, options)
	if err != nil {
		return nil, err
	}
	children := make([]Child, len(made))
	for i, c := range made {
		children[i].Err = c.Err
		if c.Err == nil {
			children[i].VM = localVM{c.VM, v.node}
		}
	}
	return children, nil
}
