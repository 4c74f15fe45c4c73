package cli

import (
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
)

// spin does something that takes a while and shows that it goes on, where
// somebody looks.
func (a *app) spin(what string, do func() error) error {
	if !a.showsProgress() {
		return do()
	}
	p := mpb.New(mpb.WithOutput(a.Stderr), mpb.WithWidth(1), mpb.WithAutoRefresh())
	bar := p.New(1, mpb.SpinnerStyle(), mpb.BarRemoveOnComplete(),
		mpb.AppendDecorators(decor.Name(what+" "), decor.Elapsed(decor.ET_STYLE_GO)))
	err := do()
	bar.SetCurrent(1)
	p.Wait()
	return err
}

// measure does something about a number of bytes, which says how far it is, and
// shows that where somebody looks.
func (a *app) measure(what string, total int64, do func(advance func(bytes int64)) error) error {
	if !a.showsProgress() || total == 0 {
		return do(func(int64) {})
	}
	p := mpb.New(mpb.WithOutput(a.Stderr), mpb.WithWidth(40), mpb.WithAutoRefresh())
	bar := p.New(total, mpb.BarStyle(), mpb.BarRemoveOnComplete(),
		mpb.PrependDecorators(decor.Name(what+" ")),
		mpb.AppendDecorators(decor.CountersKibiByte("% .1f of % .1f ")))
	err := do(func(bytes int64) { bar.IncrInt64(bytes) })
	bar.Abort(true) // does nothing if it is complete
	p.Wait()
	return err
}

// showsProgress: on a terminal, unless it is unwanted or nobody is there.
func (a *app) showsProgress() bool {
	return a.StderrTerminal && !a.quiet && a.User.Getenv("NO_COLOR") == "" && a.User.Getenv("CI") == ""
}
