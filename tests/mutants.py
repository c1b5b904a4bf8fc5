"""Small edits of the scripts that change what they compute, each with the test that it must break.

(file, text that stands there once, text put in its place, test file::test). tests/test_mutants.py runs them all.
"""

MUTANTS = [
    # the schedule and the shortcut
    ("mae.py", "linspace(1.0, alpha_min, 2 * depth", "linspace(1.0, 1.0, 2 * depth", "test_equations.py::test_schedule_falls_in_equal_steps_from_one_to_alpha_min"),
    ("mae.py", "linspace(1.0, alpha_min, 2 * depth", "linspace(1.0, alpha_min, 2 * depth + 1", "test_equations.py::test_schedule_falls_in_equal_steps_from_one_to_alpha_min"),
    ("mae.py", "self.attn(self.norm1(x)), x, alpha=self.alpha_attn", "self.attn(self.norm1(x)), x, alpha=1.0", "test_equations.py::test_encoder_is_equation_4"),
    ("mae.py", "torch.add(self.mlp(self.norm2(x)), x, alpha=self.alpha_mlp)", "torch.add(x, self.mlp(self.norm2(x)), alpha=self.alpha_mlp)", "test_equations.py::test_encoder_is_equation_4"),
    ("mae.py", "alphas[2 * l], alphas[2 * l + 1]", "alphas[2 * l + 1], alphas[2 * l]", "test_equations.py::test_encoder_is_equation_4"),
    ("mae.py", "nn.init.zeros_(block.mlp[-1].weight)", "pass", "test_equations.py::test_untrained_encoder_only_scales_its_input"),
    # patches and masks
    ("mae.py", '"b (h w) (p q c) -> b c (h p) (w q)"', '"b (h w) (q p c) -> b c (h p) (w q)"', "test_mae.py::test_unpatchify_inverts_patchify"),
    ("mae.py", '"b c (h p) (w q) -> b (h w) (p q c)"', '"b c (h p) (w q) -> b (w h) (p q c)"', "test_mae.py::test_one_pixel_moves_one_token"),
    ("mae.py", "shuffle[:, :kept], shuffle[:, kept:]", "shuffle[:, kept:], shuffle[:, :kept]", "test_mae.py::test_kept_and_masked_partition_the_patches"),
    ("mae.py", "shuffle[:, kept:], shuffle.argsort(dim=1)", "shuffle[:, kept:], shuffle", "test_mae.py::test_unshuffle_puts_an_order_revealing_input_back_in_place"),
    ("mae.py", "positions = take(patches, kept), positions[kept]", "positions = take(patches, kept), positions[: kept.shape[1]]", "test_mae.py::test_encoder_sees_the_kept_patches_at_their_positions"),
    ("mae.py", "for angle in angles for wave in", "for angle in angles[::-1] for wave in", "test_mae.py::test_positions_are_he_et_als_sine_and_cosine"),
    # targets and loss
    ("mae.py", "(variance + 1e-6).sqrt()", "variance.sqrt()", "test_mae.py::test_constant_patches_are_finite_targets"),
    ("mae.py", "    patches = patches.float()\n", "", "test_mae.py::test_normalized_patches_have_mean_zero_and_deviation_one_and_can_be_undone"),
    ("mae.py", "torch.var_mean(patches, dim=-1, keepdim=True)", "torch.var_mean(patches, dim=(1, 2), keepdim=True)", "test_mae.py::test_loss_is_he_et_als_mean_over_masked_patches"),
    ("mae.py", "normalized(take(patches, masked))", "normalized(take(patches, masked.flip(1)))", "test_mae.py::test_loss_is_he_et_als_mean_over_masked_patches"),
    ("mae.py", "return F.mse_loss(prediction.float(), target)", "return F.l1_loss(prediction.float(), target)", "test_mae.py::test_loss_is_he_et_als_mean_over_masked_patches"),
    # skips and decoder
    ("mae.py", "deepest_first = layers[::-2]", "deepest_first = layers[1::2]", "test_mae.py::test_skips_pair_deepest_first"),
    ("mae.py", "deepest_first = layers[::-2]", "deepest_first = layers[-2::-2]", "test_mae.py::test_skips_pair_deepest_first"),
    ("mae.py", "unshuffle(layer, self.token, restore)], dim=-1", "unshuffle(layer, self.token * 0, restore)], dim=-1", "test_mae.py::test_skip_sees_kept_tokens_in_place_and_its_token_where_masked"),
    ("mae.py", "return x + self.join(", "return self.join(", "test_mae.py::test_skip_sees_kept_tokens_in_place_and_its_token_where_masked"),
    ("mae.py", "unshuffle(self.decoder_embed(layers[-1]), self.mask_token", "unshuffle(self.decoder_embed(layers[0]), self.mask_token", "test_mae.py::test_without_unet_the_decoder_is_he_et_als"),
    ("mae.py", "self.head(self.decoder_norm(x))", "self.head(x)", "test_mae.py::test_without_unet_the_decoder_is_he_et_als"),
    ("mae.py", "(images - self.mean[:, None, None]) / self.std", "(images - self.mean[:, None, None]) * self.std", "test_mae.py::test_images_are_standardised_with_the_data_sets_mean_and_deviation"),
    ("mae.py", "decode(list(self.encode(patches, kept)), restore) * deviation + mean", "decode(list(self.encode(patches, kept)), restore)", "test_mae.py::test_a_perfect_prediction_reconstructs_the_image"),
    ("mae.py", "scatter(1, kept, False)", "scatter(1, masked, False)", "test_mae.py::test_reconstruction_keeps_visible_patches_whatever_the_prediction"),
    # the optimiser's schedule
    ("mae.py", "return peak * 0.5 * (1 + math.cos", "return peak * 0.5 * (1 - math.cos", "test_mae.py::test_learning_rate_warms_up_linearly_and_falls_as_a_cosine"),
    ("mae.py", "peak = config.lr * batch / 256", "peak = config.lr", "test_mae.py::test_learning_rate_warms_up_linearly_and_falls_as_a_cosine"),
]  # fmt: skip
