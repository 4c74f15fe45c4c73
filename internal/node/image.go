package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Image is an image of the node.
type Image struct {
	Name string
	// Image is nil when Err is set: the image is damaged.
	*image.Image
	Err error
}

// BuildImage makes an image under a name. Output and KernelCache of the
// configuration are the node's business.
func (n *Node) BuildImage(ctx context.Context, name string, c image.Config) (*Image, error) {
	c.KernelCache = filepath.Join(n.config.DataDir, "cache", "kernels")
	err := n.store.PublishImage(name, func(dir string) error { return buildInto(ctx, dir, c) })
	if errors.Is(err, store.ErrExists) {
		return nil, failure.New(failure.ImageExists, "an image named %q exists: remove it first, or choose another name", name)
	}
	if err != nil {
		return nil, failure.As(failure.ImageInvalid, fmt.Errorf("build image (%s): %w", name, err))
	}
	return n.Image(name)
}

// buildInto fills a directory that is the store's: image.Build publishes a whole
// directory by renaming it, and this one has to stay the one that the store holds.
func buildInto(ctx context.Context, dir string, c image.Config) error {
	c.Output = filepath.Join(dir, "new")
	if _, err := image.Build(ctx, c); err != nil {
		return err
	}
	entries, err := os.ReadDir(c.Output)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.Rename(filepath.Join(c.Output, e.Name()), filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return os.Remove(c.Output)
}

// Image opens an image. Its files stay usable when the image is removed.
func (n *Node) Image(name string) (*Image, error) {
	dir, err := n.store.Image(name)
	if errors.Is(err, store.ErrNotFound) {
		return nil, failure.New(failure.ImageNotFound, "no image named %q; 'forkvm image ls' lists them", name)
	}
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	img, err := image.Open(dir)
	if err != nil {
		return nil, failure.As(failure.ImageInvalid, fmt.Errorf("open image (%s): %w", name, err))
	}
	return &Image{Name: name, Image: img}, nil
}

// Images lists the node's images by name, damaged ones too.
func (n *Node) Images() ([]Image, error) {
	names, err := n.store.Images()
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	images := make([]Image, 0, len(names))
	for _, name := range names {
		img, err := n.Image(name)
		if failure.Is(err, failure.ImageNotFound) {
			continue // removed meanwhile
		}
		if err != nil {
			img = &Image{Name: name, Err: err}
		}
		images = append(images, *img)
	}
	return images, nil
}

// RemoveImage removes an image. VMs and snapshots made from it go on.
func (n *Node) RemoveImage(name string) error {
	err := n.store.RemoveImage(name)
	if errors.Is(err, store.ErrNotFound) {
		return failure.New(failure.ImageNotFound, "no image named %q", name)
	}
	if err != nil {
		return failure.As(failure.Internal, err)
	}
	return nil
}
